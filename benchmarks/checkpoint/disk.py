"""Measures sequential reads and writes of a whole file: with `ScratchFile`, with fio if it is
installed, and with other methods.

    python -m benchmarks.checkpoint.disk
    python -m benchmarks.checkpoint.disk --folder FOLDER_ON_THE_DISK_TO_MEASURE --size-gb 4
    python -m benchmarks.checkpoint.disk --variants "ours 4" fio --repeats 10

"ours" (threads x block size) moves tensors of 64 MiB, two at a time. `unaligned`: host memory that
direct I/O cannot use. Peers: fio with `O_DIRECT` (engine, jobs x requests in flight); four `dd`
with `O_DIRECT`; system calls through the page cache; copies from and to a mapping. The last two
start a read with an empty cache, and end a write when everything is on disk. All use the same
existing file. They take turns in a different order in each repeat, because the disk of a shared
machine varies in speed. Ratios are formed within a repeat, to the peer with the best median, and
the median of the ratios is reported. `cpu`: CPU seconds per GB, including started processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch

from benchmarks.runner import Parser, Row, by_variant, existing_folder, finish, medians, table
from zero.config import AioConfig
from zero.offload.nvme import ScratchFile, Transfer
from zero.offload.pinned import HostMemory
from zero.tools.arguments import above_zero, count

PIECE = 64 << 20  # bytes of a tensor
THREADS, BLOCKS = (1, 2, 4, 8), (256 << 10, 1 << 20, 4 << 20)
# Engine, jobs, requests in flight in each job, bytes of a request.
FIO = [
    ("psync", 4, 1, "1m"),
    ("libaio", 1, 32, "1m"),
    ("libaio", 4, 8, "1m"),
    ("io_uring", 4, 8, "1m"),
]
DIRECTIONS = ("write", "read")
# Moves all bytes of the file once in one direction, and returns the seconds.
Move = Callable[[str], float]


def ours(path: Path, size: int, buffers: list[torch.Tensor], settings: AioConfig) -> Move:
    """Use three fp32 buffers (PIECE / 4,).

    Raises RuntimeError if the bytes read are not those written.
    """
    direct = os.O_RDWR | os.O_DIRECT
    with mock.patch(
        "zero.offload.nvme._open", lambda folder: (os.open(path, os.O_RDWR), os.open(path, direct))
    ):
        file = ScratchFile(path.parent, settings)
    tensors = file.empty(size // 4, torch.float32).split(PIECE // 4)

    def end(transfer: Transfer, number: int) -> None:
        transfer.wait()
        buffer = buffers[number % 3]
        if (buffer[0].item(), buffer[-1].item()) != (number, -number):
            raise RuntimeError(f"tensor {number} was not read as it was written")

    def move(direction: str) -> float:
        begin, under_way = time.perf_counter(), []
        for number, tensor in enumerate(tensors):
            buffer = buffers[number % 3]
            if direction == "write":
                buffer[0], buffer[-1] = number, -number
            under_way.append(
                file.read(tensor, buffer) if direction == "read" else file.write(tensor, buffer)
            )
            if number:
                end(under_way[number - 1], number - 1)
        end(under_way[-1], len(tensors) - 1)
        return time.perf_counter() - begin

    return move


def fio(
    program: str, path: Path, size: int, engine: str, jobs: int, depth: int, block: str
) -> Move:
    part = size // jobs
    command = [
        program,
        "--name=peer",
        f"--filename={path}",
        "--direct=1",
        "--thread",
        "--group_reporting",
    ]
    command += [f"--ioengine={engine}", f"--numjobs={jobs}", f"--iodepth={depth}", f"--bs={block}"]
    command += [f"--size={part}", f"--offset_increment={part}", "--output-format=json"]

    def move(direction: str) -> float:
        output = subprocess.run(
            [*command, f"--rw={direction}"], check=True, capture_output=True, text=True
        ).stdout
        job = json.loads(output[output.index("{") :])["jobs"][0]
        if job[direction]["io_bytes"] != size:
            raise RuntimeError(f"fio moved {job[direction]['io_bytes']} bytes of {size}")
        return job[direction]["runtime"] / 1e3

    return move


def dd(path: Path, size: int) -> Move:
    def move(direction: str) -> float:
        count = size // 4 // (4 << 20)
        begin = time.perf_counter()
        running = []
        for number in range(4):
            place = [
                "bs=4M",
                f"count={count}",
                f"{'skip' if direction == 'read' else 'seek'}={number * count}",
            ]
            ends = [f"if={path}", "of=/dev/null", "iflag=direct"]
            if direction == "write":
                ends = ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"]
            running.append(subprocess.Popen(["dd", *ends, *place], stderr=subprocess.DEVNULL))
        if any(process.wait() for process in running):
            raise RuntimeError("dd failed")
        return time.perf_counter() - begin

    return move


@contextlib.contextmanager
def uncached(path: Path, direction: str) -> Iterator[int]:
    """Open a file.

    Nothing of it is in the page cache before a read. All of it is on disk after a write.
    """
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    yield descriptor
    if direction == "write":
        os.fsync(descriptor)
    else:
        os.posix_fadvise(
            descriptor, 0, 0, os.POSIX_FADV_DONTNEED
        )  # so that the next variant need not do it
    os.close(descriptor)


def buffered(path: Path, size: int) -> Move:
    memory = memoryview(mmap.mmap(-1, PIECE))

    def move(direction: str) -> float:
        call = os.preadv if direction == "read" else os.pwritev
        begin = time.perf_counter()
        with uncached(path, direction) as descriptor:
            for start in range(0, size, PIECE):
                if call(descriptor, [memory], start) != PIECE:
                    raise RuntimeError("not all bytes were moved")
        return time.perf_counter() - begin

    return move


def mapped(path: Path, size: int) -> Move:
    memory = torch.frombuffer(mmap.mmap(-1, PIECE), dtype=torch.uint8)

    def move(direction: str) -> float:
        begin = time.perf_counter()
        with uncached(path, direction) as descriptor:
            mapping = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
            for start in range(0, size, PIECE):
                ends = (memory.data_ptr(), mapping[start:].data_ptr())
                ctypes.memmove(*(ends if direction == "read" else ends[::-1]), PIECE)
            del mapping
        return time.perf_counter() - begin

    return move


def label(settings: AioConfig) -> str:
    return f"{settings.thread_count} x {settings.block_size >> 10}K"


def variants(path: Path, size: int) -> dict[str, Move]:
    """Return all variants.

    They use the same file: on a virtual disk, files differ in speed by a third.
    """
    path.touch()
    buffered(path, size)("write")
    memory, moves, default = HostMemory(), {}, AioConfig()
    buffers = [memory.take(PIECE).view(torch.float32) for _ in range(3)]
    unaligned = [memory.take(PIECE, phase=128).view(torch.float32) for _ in range(3)]
    for threads in THREADS:
        for block in BLOCKS:
            settings = AioConfig(block_size=block, thread_count=threads)
            moves[f"ours {label(settings)}"] = ours(path, size, buffers, settings)
    moves[f"ours {label(default)} unaligned"] = ours(path, size, unaligned, default)
    if program := shutil.which("fio"):
        for engine, jobs, depth, block in FIO:
            moves[f"fio {engine} {jobs} x {depth}"] = fio(
                program, path, size, engine, jobs, depth, block
            )
    return moves | {
        "dd direct, 4": dd(path, size),
        "page cache": buffered(path, size),
        "mapping": mapped(path, size),
    }


def cpu_seconds() -> float:
    """Return the CPU seconds of this process (all threads), and of child processes that have
    ended.
    """
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(move: Move, size: int) -> dict[str, float]:
    """Return bytes/s and CPU seconds for a GB, by direction."""
    found = {}
    for direction in DIRECTIONS:
        before = cpu_seconds()
        found[direction] = size / move(direction)
        found[f"{direction} cpu"] = (cpu_seconds() - before) / (size / 1e9)
    return found


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--folder", type=existing_folder, help="on the disk to measure; default: temporary")
    add("--size-gb", type=above_zero, default=2, help="size of the file")
    add("--repeats", type=count, default=3)
    add("--variants", nargs="+", help="first words of names in the table; default: all")
    parser.add_output()
    args = parser.parse_args()
    size = max(1, round(args.size_gb * 1e9 / PIECE)) * PIECE
    repeats: list[dict[str, Row]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        moves = {
            name: move
            for name, move in variants(Path(folder) / "file", size).items()
            if name.startswith(tuple(args.variants or [""]))
        }
        for number in range(1, args.repeats + 1):
            order = random.sample(list(moves), len(moves))
            repeats.append({name: measure(moves[name], size) for name in order})
            print(f"repeat {number}/{args.repeats}, load {os.getloadavg()[0]:.1f}", flush=True)
    rows = {name: medians([repeat[name] for repeat in repeats]) for name in moves}
    peers = [name for name in rows if not name.startswith("ours")] or list(rows)
    columns, caption = {"variant": "variant"}, f"{size / 1e9:.2f} GB"
    for direction in DIRECTIONS:
        best = max(peers, key=lambda name: rows[name][direction])
        for name, row in rows.items():
            ratios = [repeat[name][direction] / repeat[best][direction] for repeat in repeats]
            row[f"{direction} ratio"] = statistics.median(ratios)
        columns |= {f"{direction} MB/s": (direction, 1e6), f"{direction} s/GB": f"{direction} cpu"}
        columns |= {f"{direction} / best": f"{direction} ratio"}
        caption += f"; best peer of {direction}: {best}"
    if not any(name.startswith("fio") for name in rows):
        caption += "; fio is not installed"
    caption += f"; the default is {label(AioConfig())}"
    finish(args, table(caption, columns, by_variant(rows)), rows=rows, repeats=repeats)


if __name__ == "__main__":
    main()
