"""Compare many odd models on the engine with plain torch: `python -m tests.hunt --models 200`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.hunt.hunt import DIFFERENT, EQUAL, REFUSED, hunt, settings_of
from tests.hunt.models import recipe


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--refused", action="store_true", help="print refusals too")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.models)
    count: Counter[tuple[str, str]] = Counter()
    for start in range(0, len(seeds), 20):
        tasks = [(seed, i) for seed in seeds[start : start + 20] for i in range(4)]
        for (seed, number), verdict in zip(tasks, hunt(tasks, arguments.ranks), strict=True):
            count[verdict.outcome, f"stage {settings_of(seed)[number].stage}"] += 1
            if verdict.outcome == REFUSED and not recipe(seed).may_be_refused:
                print(f"{seed}/{number} is refused, and need not be: {verdict.details}")
            if verdict.outcome == DIFFERENT or (arguments.refused and verdict.outcome == REFUSED):
                print(f"{seed}/{number} {verdict.outcome}: {verdict.recipe}; {verdict.setting}")
                print(f"    {verdict.details}", flush=True)
    print(f"{'':18}" + "".join(f"{stage:>10}" for stage in ("stage 1", "stage 2", "stage 3")))
    for outcome in (EQUAL, REFUSED, DIFFERENT):
        numbers = [count[outcome, f"stage {stage}"] for stage in (1, 2, 3)]
        print(f"{outcome:18}" + "".join(f"{number:>10}" for number in numbers))
    return int(any(outcome == DIFFERENT for outcome, _ in count))


if __name__ == "__main__":
    sys.exit(main())
