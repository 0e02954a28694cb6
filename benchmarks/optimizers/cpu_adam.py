"""Measures one step of Adam on host memory: this engine's, several of torch's and, if given,
DeepSpeed's C++ op.

    python -m benchmarks.optimizers.cpu_adam
    python -m benchmarks.optimizers.cpu_adam --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED

The gradient is of `--dtypes`. If that has 16 bits, the step also writes a parameter of that dtype.
Master and two moments are fp32. This is at least 28 bytes per parameter, or 16 with 8-bit moments.
Of the two default sizes one fits in the caches, and one does not. The contestants take turns on the
same memory, one step each (of small tensors, many), so that a busy machine disturbs all of them
alike. The first round does not count. `ns`: per parameter, of the fastest step, with the median in
brackets. `cpu ns`: the least sum over all threads. `GB/s` and the following columns are those of
the fastest step. `of triad`: relative to the bandwidth of two fp32 reads and one write in the same
rounds. `/ better`: `ns` and `cpu ns`, relative to the better one of torch's fused step and
DeepSpeed's."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from benchmarks.arguments import Parser, interpreter, result_file
from benchmarks.launch import REPOSITORY
from benchmarks.optimizers.cpu_adam_worker import DTYPES
from zero.tools.arguments import count

OURS = ["ours", "ours, 8-bit moments", "torch fused", "triad"]
OTHERS = ["torch.compile", "torch foreach", "torch default"]
RIVALS = ["torch fused", "deepspeed"]
# Bytes a parameter. Read: gradient, master, moments. Written: master, moments, parameter. (A fp32
# gradient is not of 2 bytes, but then no parameter of 2 bytes is written.)
BYTES = (2 + 3 * 4) + (3 * 4 + 2)
# With 8-bit moments, without their scales; a triad's.
CODED_BYTES, TRIAD_BYTES = 2 * (2 + 4 + 2), 3 * 4

Samples = dict[str, list[dict[str, float]]]


def parse_arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--deepspeed-python",
        type=interpreter,
        help="interpreter of an environment that has deepspeed",
    )
    parser.add_argument("--others", action="store_true", help=f"also {', '.join(OTHERS)}")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--numel", type=count, nargs="+", default=[1 << 16, 50_000_000], help="parameters"
    )
    parser.add_argument("--threads", type=count, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "cpu_adam.json"
    )
    return parser.parse_args()


@contextmanager
def worker(
    python: str, contestants: list[str], numel: int, dtype: str, threads: int
) -> Iterator[subprocess.Popen]:
    """Start a process of `benchmarks.optimizers.cpu_adam_worker` and wait until it is ready. It
    ends with the context.

    Raises RuntimeError if it does not become ready. Its own messages are on standard error.
    """
    command = [
        python,
        "-m",
        "benchmarks.optimizers.cpu_adam_worker",
        "--numel",
        str(numel),
        "--dtype",
        dtype,
        "--contestants",
        *contestants,
    ]
    # Otherwise DeepSpeed looks for a GPU.
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        if not process.stdout.readline():
            raise RuntimeError(f"not started: {' '.join(command)}")
        yield process
    finally:
        process.stdin.close()
        process.wait()


def step(process: subprocess.Popen, contestant: str) -> dict[str, float]:
    print(contestant, file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def measure(args: argparse.Namespace, numel: int, dtype: str, threads: int) -> Samples:
    """Return the seconds of every contestant's steps, without the first one."""
    with ExitStack() as stack:
        place = {}
        names = OURS + (OTHERS if args.others else [])
        here = stack.enter_context(worker(sys.executable, names, numel, dtype, threads))
        place.update(dict.fromkeys(names, here))
        if args.deepspeed_python:
            there = worker(args.deepspeed_python, ["deepspeed"], numel, dtype, threads)
            place["deepspeed"] = stack.enter_context(there)
        samples: Samples = {name: [] for name in place}
        for number in range(args.rounds + 1):
            for name, process in place.items():
                seconds = step(process, name)
                if number:
                    samples[name].append(seconds)
    return samples


def summary(samples: Samples, numel: int) -> dict[str, dict[str, float]]:
    """Return nanoseconds a parameter of each contestant, and figures of its fastest step."""
    rows = {}
    for name, steps in samples.items():
        fastest = min(sample["wall"] for sample in steps)
        rows[name] = {
            "ns": fastest * 1e9 / numel,
            "median_ns": statistics.median(sample["wall"] for sample in steps) * 1e9 / numel,
            "cpu_ns": min(sample["cpu"] for sample in steps) * 1e9 / numel,
            "gb_per_s": {"triad": TRIAD_BYTES, OURS[1]: CODED_BYTES}.get(name, BYTES)
            * numel
            / fastest
            / 1e9,
        }
    for row in rows.values():
        row["of_triad"] = row["gb_per_s"] / rows["triad"]["gb_per_s"]
        for key in ("ns", "cpu_ns"):
            better = min(rows[name][key] for name in RIVALS if name in rows)
            row[f"{key}_of_better"] = row[key] / better
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [f"{'contestant':<20}   ns (median)     cpu ns   GB/s  of triad  / better (cpu)"]
    for name, row in rows.items():
        cells = [f"{row['ns']:6.2f} ({row['median_ns']:6.2f})", f"{row['cpu_ns']:7.2f}"]
        cells += [f"{row['gb_per_s']:5.1f}", f"{row['of_triad']:8.2f}"]
        if name != "triad":
            cells.append(f"{row['ns_of_better']:5.2f} ({row['cpu_ns_of_better']:.2f})")
        lines.append("  ".join([f"{name:<20}", *cells]))
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    results = []
    for numel, dtype, threads in itertools.product(args.numel, args.dtypes, args.threads):
        samples = measure(args, numel, dtype, threads)
        rows = summary(samples, numel)
        case = {"numel": numel, "dtype": dtype, "threads": threads}
        results.append(case | {"rows": rows, "samples": samples})
        print(
            f"\n{numel:,} parameters, {dtype}, {threads} thread(s), {args.rounds} rounds, load "
            f"{os.getloadavg()[0]:.1f}\n\n{table(rows)}",
            flush=True,
        )
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"versions": versions, "results": results}, indent=2))
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
