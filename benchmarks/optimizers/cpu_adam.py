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

import itertools
import json
import os
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.optimizers.cpu_adam_worker import DTYPES
from benchmarks.runner import REPOSITORY, Parser, Row, environment, finish, table
from zero.tools.arguments import count

CODED, TRIAD = "ours, 8-bit moments", "triad"
OURS = ["ours", CODED, "torch fused", TRIAD]
OTHERS = ["torch.compile", "torch foreach", "torch default"]
RIVALS = ["torch fused", "deepspeed"]
# Bytes a parameter. Read: gradient, master, moments. Written: master, moments, parameter. (A fp32
# gradient is not of 2 bytes, but then no parameter of 2 bytes is written.) 8-bit moments are
# counted without their scales.
BYTES = {CODED: 2 * (2 + 4 + 2), TRIAD: 3 * 4}
BYTES_OF_OTHERS = (2 + 3 * 4) + (3 * 4 + 2)
COLUMNS = {
    "contestant": "contestant",
    "ns": ("fastest", 1e-9),
    "median ns": ("median", 1e-9),
    "cpu ns": ("cpu", 1e-9),
    "GB/s": ("bandwidth", 1e9),
    "of triad": "of triad",
    "/ better": "fastest of better",
    "cpu / better": "cpu of better",
}
Samples = dict[str, list[dict[str, float]]]


@contextmanager
def worker(
    names: list[str], numel: int, dtype: str, threads: int, args: Namespace
) -> Iterator[subprocess.Popen]:
    """Start a process of `benchmarks.optimizers.cpu_adam_worker` and wait until it is ready. It
    ends with the context.

    Raises RuntimeError if it does not become ready. Its own messages are on standard error.
    """
    there = environment(names[0], args)
    command = [there.get("python", sys.executable), "-m", "benchmarks.optimizers.cpu_adam_worker"]
    command += ["--numel", str(numel), "--dtype", dtype, "--contestants", *names]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), **there.get("env", {})}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=REPOSITORY, env=env, stdin=pipe, stdout=pipe, text=True)
    try:
        if not process.stdout.readline():
            raise RuntimeError(f"not started: {' '.join(command)}")
        yield process
    finally:
        process.stdin.close()
        process.wait()


def measure(args: Namespace, *case: int | str) -> Samples:
    """Return the seconds of every contestant's steps, without the first one."""
    with ExitStack() as stack:
        names = OURS + (OTHERS if args.others else [])
        place = dict.fromkeys(names, stack.enter_context(worker(names, *case, args)))
        if args.deepspeed_python:
            place["deepspeed"] = stack.enter_context(worker(["deepspeed"], *case, args))
        samples: Samples = {name: [] for name in place}
        for number in range(args.rounds + 1):
            for name, process in place.items():
                print(name, file=process.stdin, flush=True)
                seconds = json.loads(process.stdout.readline())
                if number:
                    samples[name].append(seconds)
    return samples


def summary(samples: Samples, numel: int) -> list[Row]:
    """Return seconds a parameter of each contestant, and figures of its fastest step."""
    rows = {}
    for name, steps in samples.items():
        wall = [sample["wall"] / numel for sample in steps]
        rows[name] = {"contestant": name, "fastest": min(wall), "median": statistics.median(wall)}
        rows[name]["cpu"] = min(sample["cpu"] for sample in steps) / numel
        rows[name]["bandwidth"] = BYTES.get(name, BYTES_OF_OTHERS) / min(wall)
    for name, row in rows.items():
        row["of triad"] = row["bandwidth"] / rows[TRIAD]["bandwidth"]
        for key in ("fastest", "cpu"):
            if name != TRIAD:
                better = min(rows[rival][key] for rival in RIVALS if rival in rows)
                row[f"{key} of better"] = row[key] / better
    return list(rows.values())


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--others", action="store_true", help=f"also {', '.join(OTHERS)}")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    add("--numel", type=count, nargs="+", default=[1 << 16, 50_000_000], help="parameters")
    add("--threads", type=count, nargs="+", default=[1, 2])
    add("--rounds", type=count, default=7)
    parser.add_deepspeed()
    parser.add_output()
    args = parser.parse_args()
    tables = []
    for numel, dtype, threads in itertools.product(args.numel, args.dtypes, args.threads):
        rows = summary(measure(args, numel, dtype, threads), numel)
        load = os.getloadavg()[0]
        caption = f"{numel:,} parameters, {dtype}, {threads} thread(s), load {load:.1f}"
        print(caption, file=sys.stderr, flush=True)
        tables.append(table(caption, COLUMNS, rows))
    finish(args, *tables)


if __name__ == "__main__":
    main()
