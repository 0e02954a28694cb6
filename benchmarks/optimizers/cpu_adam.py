"""Measures one step of Adam on host memory: this engine's, several of torch's and, if given,
DeepSpeed's C++ op.

    python -m benchmarks.optimizers.cpu_adam
    python -m benchmarks.optimizers.cpu_adam --deepspeed-python PATH_OF_A_PYTHON_THAT_HAS_DEEPSPEED

The input is a bf16 gradient, the output a bf16 parameter; master and two moments are fp32. This is
at least 28 bytes per parameter, or 16 with 8-bit moments. The contestants take turns on the same
memory, one step each, so that a busy machine disturbs all of them alike. The first round does not
count. `ms`: the fastest step, with the median in brackets. `cpu ms`: the least sum over all
threads. `GB/s` and the following columns are those of the fastest step. `of triad`: relative to the
bandwidth of two fp32 reads and one write in the same rounds."""

from __future__ import annotations

import argparse
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
from zero.tools.arguments import count

OURS = [
    "ours",
    "ours, 8-bit moments",
    "torch.compile",
    "torch fused + casts",
    "torch foreach + casts",
]
OURS += ["torch default + casts", "triad"]
# Bytes a parameter. Read: gradient, master, moments. Written: master, moments, parameter.
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
    parser.add_argument("--numel", type=count, default=100_000_000, help="parameters")
    parser.add_argument("--threads", type=count, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "cpu_adam.json"
    )
    return parser.parse_args()


@contextmanager
def worker(
    python: str, contestants: list[str], numel: int, threads: int
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


def measure(args: argparse.Namespace, threads: int) -> Samples:
    """Return the seconds of every contestant's steps, without the first one."""
    with ExitStack() as stack:
        place = {}
        here = stack.enter_context(worker(sys.executable, OURS, args.numel, threads))
        place.update(dict.fromkeys(OURS, here))
        if args.deepspeed_python:
            there = worker(args.deepspeed_python, ["deepspeed"], args.numel, threads)
            place["deepspeed"] = stack.enter_context(there)
        samples: Samples = {name: [] for name in place}
        for number in range(args.rounds + 1):
            for name, process in place.items():
                seconds = step(process, name)
                if number:
                    samples[name].append(seconds)
            print(
                f"{threads} threads, round {number}/{args.rounds}  load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    return samples


def summary(samples: Samples, numel: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of each contestant, and figures of its fastest step."""
    rows = {}
    for name, steps in samples.items():
        fastest = min(sample["wall"] for sample in steps)
        rows[name] = {
            "ms": fastest * 1e3,
            "median_ms": statistics.median(sample["wall"] for sample in steps) * 1e3,
            "cpu_ms": min(sample["cpu"] for sample in steps) * 1e3,
            "ns_per_parameter": fastest * 1e9 / numel,
            "gb_per_s": {"triad": TRIAD_BYTES, OURS[1]: CODED_BYTES}.get(name, BYTES)
            * numel
            / fastest
            / 1e9,
        }
    for row in rows.values():
        row["of_triad"] = row["gb_per_s"] / rows["triad"]["gb_per_s"]
        if "deepspeed" in rows:
            row["times_deepspeed"] = rows["deepspeed"]["ms"] / row["ms"]
            row["times_deepspeed_median"] = rows["deepspeed"]["median_ms"] / row["median_ms"]
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [
        f"{'contestant':<22}  ms (median)       cpu ms  ns/param   GB/s  of triad  x deepspeed (of "
        "medians)"
    ]
    for name, row in rows.items():
        cells = [f"{row['ms']:7.1f} ({row['median_ms']:7.1f})", f"{row['cpu_ms']:7.1f}"]
        cells += [
            f"{row['ns_per_parameter']:8.2f}",
            f"{row['gb_per_s']:5.1f}",
            f"{row['of_triad']:8.2f}",
        ]
        if "times_deepspeed" in row and name != "triad":
            cells.append(f"{row['times_deepspeed']:6.2f} ({row['times_deepspeed_median']:.2f})")
        lines.append("  ".join([f"{name:<22}", *cells]))
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    samples = {threads: measure(args, threads) for threads in args.threads}
    rows = {threads: summary(of_threads, args.numel) for threads, of_threads in samples.items()}
    for threads, of_threads in rows.items():
        print(
            f"\n{args.numel / 1e6:g}M parameters, {threads} thread(s), {args.rounds} "
            f"rounds\n\n{table(of_threads)}"
        )
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(
        json.dumps(
            {"versions": versions, "numel": args.numel, "rows": rows, "samples": samples}, indent=2
        )
    )
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
