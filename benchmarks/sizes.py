"""Measures what was chosen by a measurement: sizes of blocks, each as it is, a quarter of it and
four times as much.

    python -m benchmarks.sizes
    python -m benchmarks.sizes --only coding messages --rounds 9 --folder FOLDER_ON_A_DISK

The sizes take turns. The columns are medians over the rounds: seconds with the size as it is, and
ratios to it within a round, so above 1 is slower. Sizes of files depend on the disk: name a folder
on it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from benchmarks.arguments import Parser, existing_folder, result_file
from benchmarks.launch import REPOSITORY, report, run_ranks
from zero.checkpoint import blocks, files
from zero.comm import communicator, quantized
from zero.config import AioConfig
from zero.offload.nvme import ScratchFile
from zero.optim import adam_cpu, muon, rounding
from zero.tools.arguments import count

NUMEL = 1 << 24
FACTORS = 1, 0.25, 4
# The size as it is, and what is timed with a size.
Case = tuple[int, Callable[[int], object]]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def adam(_: Path) -> Case:
    """Elements that a thread of the CPU's Adam takes at a time."""
    master, grad, exp_avg, exp_avg_sq = (random(NUMEL).abs() for _ in range(4))
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}

    def act(size: int) -> None:
        with mock.patch.object(adam_cpu, "PIECE", size):
            tensors = master, grad, exp_avg, exp_avg_sq, None
            adam_cpu.adam(*tensors, step=9, **numbers, decoupled=True, factor=1.0)

    return adam_cpu.PIECE, act


def matrices(_: Path) -> Case:
    """Elements of equal matrices that Muon multiplies together."""
    params = [torch.nn.Parameter(random(64, 64)) for _ in range(1024)]
    optimizer = muon.BatchedMuon(params, **muon.MUON_DEFAULTS)
    for param in params:
        param.grad = random(64, 64)

    def act(size: int) -> None:
        with mock.patch.object(muon, "BATCH", size):
            optimizer.step()

    return muon.BATCH, act


def rounding_blocks(_: Path) -> Case:
    """Elements that are rounded stochastically at a time on a CPU."""
    source, noise = random(NUMEL), torch.zeros(NUMEL, dtype=torch.int32)

    def act(size: int) -> None:
        for part, numbers in zip(source.split(size), noise.split(size), strict=True):
            rounding.rounded(part, numbers)

    return rounding.at_a_time(torch.device("cpu")), act


def coding(_: Path) -> Case:
    """Values of a quantized message that are coded at a time on a CPU."""
    source = random(NUMEL)
    message = torch.empty(quantized.message_bytes(NUMEL, 8), dtype=torch.uint8)

    def act(size: int) -> None:
        with mock.patch.dict(quantized.AT_A_TIME, cpu=size):
            quantized.encode(source, message, 8)

    return quantized.AT_A_TIME["cpu"], act


def checkpoint_blocks(folder: Path) -> Case:
    """Bytes of a checkpoint's file that are written and checksummed at a time."""
    tensor = random(NUMEL * 4)
    slices = [files.Slice("weight", tensor.numel(), 0, tensor)]

    def act(size: int) -> None:
        with mock.patch.object(files, "BLOCK", size):
            files.write(slices, folder, "blocks.safetensors")
        (folder / "blocks.safetensors").unlink()

    return files.BLOCK, act


def checkpoint_threads(folder: Path) -> Case:
    """Threads that write a checkpoint's file."""
    _, write = checkpoint_blocks(folder)

    def act(size: int) -> None:
        with mock.patch.object(blocks, "THREADS", size):
            write(files.BLOCK)

    return blocks.THREADS, act


def offload_blocks(folder: Path) -> Case:
    """Bytes of offloaded tensors that are read and written at a time."""
    source = random(NUMEL * 2)

    def act(size: int) -> None:
        file = ScratchFile(folder, AioConfig(block_size=size))
        tensor = file.empty(source.numel(), source.dtype)
        file.write(tensor, source).wait()
        file.read(tensor, source).wait()

    return AioConfig().block_size, act


CASES = {
    "adam": adam,
    "muon": matrices,
    "rounding": rounding_blocks,
    "coding": coding,
    "checkpoint": checkpoint_blocks,
    "threads": checkpoint_threads,
    "offload": offload_blocks,
}


def timed(act: Callable[[int], object], size: int) -> float:
    begin = time.perf_counter()
    act(size)
    return time.perf_counter() - begin


def measure(value: int, act: Callable[[int], object], rounds: int) -> dict[str, object]:
    """Return the result for each factor. The first round does not count."""
    chosen = [max(1, int(value * factor)) for factor in FACTORS]
    seconds = [[timed(act, size) for size in chosen] for _ in range(rounds + 1)][1:]
    ratios = [
        statistics.median(row[number] / row[0] for row in seconds) for number in range(len(FACTORS))
    ]
    usual = statistics.median(row[0] for row in seconds)
    return {"size": value, "seconds": usual, **dict(zip(map(str, FACTORS), ratios, strict=True))}


def measure_messages(rounds: int) -> None:
    """Bytes of gloo's messages that are summed, on one of two ranks."""
    comm = communicator.communicator()
    full, out = random(NUMEL), torch.empty(NUMEL // comm.world_size)

    def act(size: int) -> None:
        with mock.patch.object(communicator, "SUMMED_MESSAGE", size):
            comm.reduce_scatter(out, full, False, NUMEL).wait()

    report(measure(communicator.SUMMED_MESSAGE, act, rounds))


def main() -> None:
    parser, names = Parser(__doc__), [*CASES, "messages"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--folder", type=existing_folder, default=Path(tempfile.gettempdir()))
    output = REPOSITORY / "benchmarks" / "out" / "sizes.json"
    parser.add_argument("--output", type=result_file, default=output)
    parser.add_argument("--rank", action="store_true", help="is one of the ranks of `messages`")
    options = parser.parse_args()
    if options.rank:
        measure_messages(options.rounds)
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs")
    print(f"{'':12}{'as it is':>12}{'s':>10}{'x 1/4':>8}{'x 4':>8}")
    found = {}
    for name in options.only:
        if name == "messages":
            command = ["-m", "benchmarks.sizes", "--rank", "--rounds", str(options.rounds)]
            row = run_ranks(sys.executable, command, 2, 300.0)[0]
        else:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                row = measure(*CASES[name](Path(folder)), options.rounds)
        found[name] = row
        print(f"{name:12}{row['size']:12,}{row['seconds']:10.4f}{row['0.25']:8.2f}{row['4']:8.2f}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
