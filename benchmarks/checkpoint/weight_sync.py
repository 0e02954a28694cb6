"""Measures the time and memory of giving every rank all weights of a T5 of 1.0e9 parameters, as an
inference engine needs them.

    python -m benchmarks.checkpoint.weight_sync
    python -m benchmarks.checkpoint.weight_sync --deepspeed-python PYTHON_WITH_DEEPSPEED

bf16, stage 3, two ranks. `a parameter at a time` and `all at once` use `GatheredParameters`, of
this engine and of DeepSpeed. Only this engine has `stream_weights`. Seconds are medians over the
rounds. `extra MB` is the largest anonymous memory of a rank beyond its shards. `gathers` counts
this engine's collectives."""

from __future__ import annotations

import json
import sys

from benchmarks.arguments import Parser, interpreter, result_file
from benchmarks.launch import REPOSITORY, run_ranks
from zero.tools.arguments import count


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--deepspeed-python",
        type=interpreter,
        help="interpreter of an environment that has deepspeed",
    )
    parser.add_argument("--processes", type=count, default=2)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "weight_sync.json"
    )
    args = parser.parse_args()
    engines = {"zero": (sys.executable, {})}
    if args.deepspeed_python:
        engines["deepspeed"] = (args.deepspeed_python, {"DS_ACCELERATOR": "cpu"})
    found = {}
    for engine, (python, env) in engines.items():
        command = ["-m", "benchmarks.checkpoint.weight_sync_worker", engine, str(args.rounds)]
        print(f"{engine} ...", file=sys.stderr, flush=True)
        found[engine] = run_ranks(python, command, args.processes, 1500, env)[0]
    print(
        f"\nT5 of {found['zero']['parameters'] / 1e9:.3f}e9 parameters, bf16, {args.processes} "
        "ranks\n"
    )
    print(f"{'':<36}{'seconds':>9}{'extra MB':>10}{'gathers':>9}")
    for engine, result in found.items():
        for name, way in result["ways"].items():
            gathers = way["gathers"] if engine == "zero" else "-"
            print(
                f"{engine + ', ' + name:<36}{way['seconds']:>9.2f}"
                f"{way['memory'] / 1e6:>10.0f}{gathers:>9}"
            )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=2))
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
