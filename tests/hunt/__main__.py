"""Compare what is odd with plain torch: models, losses and blocks that are split, uses of
logits, and saves; and damage files.

    python -m tests.hunt --models 200
    python -m tests.hunt --all
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator

from tests.hunt import damage, logits, saves, splits
from tests.hunt.hunt import DIFFERENT, EQUAL, REFUSED, hunt, settings_of
from tests.hunt.models import recipe
from tests.processes import run_on

TIMEOUT = 3600


def models(seeds: range, ranks: int, shows_refused: bool) -> Iterator[str]:
    """Yield the outcome of each model under each of its settings, and print what is odd."""
    for start in range(0, len(seeds), 20):
        tasks = [(seed, i) for seed in seeds[start : start + 20] for i in range(4)]
        for (seed, number), verdict in zip(tasks, hunt(tasks, ranks), strict=True):
            if verdict.outcome == REFUSED and not recipe(seed).may_be_refused:
                print(f"{seed}/{number} is refused, and need not be: {verdict.details}")
            if verdict.outcome == DIFFERENT or (shows_refused and verdict.outcome == REFUSED):
                print(f"{seed}/{number} {verdict.outcome}: {verdict.recipe}; {verdict.setting}")
                print(f"    {verdict.details}", flush=True)
            yield f"stage {settings_of(seed)[number].stage}, {verdict.outcome}"


def others(ranks: int, seeds: int) -> Iterator[str]:
    """The same for what is split and saved, and for damaged files, which one process reads."""
    drawn = list(range(seeds))
    for refused, different in run_on(ranks, splits.judge, drawn, timeout=TIMEOUT)[0]:
        yield _outcome("split", refused, different)
    drawn = list(range(10 * seeds))
    for is_adapted in (False, True):
        different = run_on(ranks, logits.judge, 3, drawn, is_adapted, timeout=TIMEOUT)[0]
        for each in different:
            yield _outcome("logits", "", each)
        yield from ["logits, " + EQUAL] * (len(drawn) - len(different))
    tasks = [(name, stage) for name in saves.MAKERS for stage in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        for refused, different in run_on(ranks, saves.judge, folder, tasks, timeout=TIMEOUT)[0]:
            yield _outcome("saved", refused, different)
    with tempfile.TemporaryDirectory() as folder:
        at_once = range(10 * seeds)
        faults = run_on(1, damage.judge_all, folder, at_once, timeout=TIMEOUT)[0]
    for fault in faults:
        yield _outcome("damaged", "", fault)
    yield from ["damaged, " + EQUAL] * (len(at_once) - len(faults))


def _outcome(what: str, refused: object, different: str) -> str:
    if different:
        print(different, flush=True)
    return f"{what}, {DIFFERENT if different else REFUSED if refused else EQUAL}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--refused", action="store_true", help="print refusals too")
    parser.add_argument(
        "--all", action="store_true", help="losses, blocks, logits, saves and damage too"
    )
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.models)
    count = Counter(models(seeds, options.ranks, options.refused))
    if options.all:
        count.update(others(options.ranks, options.models))
    for outcome, number in sorted(count.items()):
        print(f"{number:>8}  {outcome}")
    return int(any(outcome.endswith(DIFFERENT) for outcome in count))


if __name__ == "__main__":
    sys.exit(main())
