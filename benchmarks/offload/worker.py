"""One rank of one variant of the offload benchmark, started by `benchmarks.offload` on each rank in
a new process.

A variant trains a T5 with random weights, with this engine or with DeepSpeed in its own
environment, and reports the cost of its steps. `floor` does not train. It measures the lower
bounds: plain torch's forward and backward, and the bandwidths of host memory, of a file, and to and
from the GPU. Parameters are bf16 on a GPU and fp32 on a CPU, because most CPUs have no instructions
for bf16."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.launch import report
from benchmarks.models import T5_42M, build_t5, synthetic_batches

MODELS = {
    # For trials.
    "t5-10m": {
        "d_model": 256,
        "d_ff": 1024,
        "num_layers": 4,
        "num_heads": 4,
        "d_kv": 64,
        "vocab_size": 8192,
    },
    "t5-42m": T5_42M,
    # The shapes of the published t5-small and t5-3b: 60.5 and 2852 million parameters.
    "t5-small": {
        "d_model": 512,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "d_kv": 64,
        "vocab_size": 32128,
    },
    "t5-3b": {
        "d_model": 1024,
        "d_ff": 16384,
        "num_layers": 24,
        "num_heads": 32,
        "d_kv": 128,
        "vocab_size": 32128,
    },
}
BUILD_SEED = 1
CLIP = 1.0
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
# Elements of the triad's fp32 vectors; bytes of a tensor in a file, and their number; how often
# each is measured.
TRIAD_NUMEL, PIECE, PIECES, TRIES = 30_000_000, 64 << 20, 4, 5

Batch = dict[str, torch.Tensor]
TrainStep = Callable[[Batch], torch.Tensor]


def compute_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def compute_dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- the variants: functions from a plain model to a training step, and the engine if it is this one


def ds_config(args: argparse.Namespace, zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": args.batch // args.micro_batches,
        "gradient_accumulation_steps": args.micro_batches,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": compute_dtype() == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": 3, **zero},
    }


def initialized(package: Any, model: nn.Module, config: dict[str, Any]) -> tuple[TrainStep, Any]:
    """Return the step of an engine with DeepSpeed's interface.

    `package`: `zero` or the real `deepspeed`.
    """
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=config)

    def train_step(batch: Batch) -> torch.Tensor:
        losses = []
        for part in micro_batches(batch, config["gradient_accumulation_steps"]):
            loss = engine(**part).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return train_step, engine


def micro_batches(batch: Batch, number: int) -> list[Batch]:
    chunks = {name: value.chunk(number) for name, value in batch.items()}
    return [{name: chunk[i] for name, chunk in chunks.items()} for i in range(number)]


def section(
    folder: str, parameters: str, optimizer: str, coded: bool = False, **settings: Any
) -> dict[str, Any]:
    """`zero_optimization` of a variant of this engine: devices for parameters and optimizer state.

    Args:
        coded: 8-bit moments.
        settings: of `offload_optimizer`.
    """
    path = {"nvme_path": folder}
    return {
        # With the default limit the whole model would stay in host memory.
        "offload_param": {"device": parameters, **path, "max_in_cpu": 0},
        "offload_optimizer": {"device": optimizer, **path, **settings},
        "sub_group_size": 50_000_000,
        "zero_quantized_moments": coded,
    }


def ours(
    model: nn.Module, args: argparse.Namespace, section: Callable[[str], dict[str, Any]]
) -> tuple[TrainStep, Any]:
    """This engine with a section `zero_optimization`, which is made for a folder."""
    # imported here, because DeepSpeed's environment may lack packages that it needs
    import zero

    config = ds_config(args, section(str(args.folder)))
    if args.live:
        config["zero_optimization"]["stage3_max_live_parameters"] = args.live
    config["activation_checkpointing"] = {"batch_slices": args.slices}
    return initialized(zero, model, config)


def variant(*devices: str, **settings: Any) -> partial:
    """`ours` with the `section` of these devices and settings."""
    return partial(ours, section=lambda folder: section(folder, *devices, **settings))


def deepspeed(model: nn.Module, args: argparse.Namespace) -> tuple[TrainStep, None]:
    """DeepSpeed at stage 3, with parameters and optimizer in host memory, and its C++ Adam."""
    import deepspeed

    deepspeed.comm.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    away = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    config = ds_config(args, {"offload_param": away, "offload_optimizer": away})
    return initialized(deepspeed, model, config)[0], None


def fsdp2(model: nn.Module, args: argparse.Namespace) -> tuple[TrainStep, None]:
    """`fully_shard` on each T5 block and on the root.

    With `CPUOffloadPolicy` on a GPU, without offload on a CPU.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    mesh = dist.init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),))
    policies = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype(), reduce_dtype=compute_dtype()
        ),
        "offload_policy": CPUOffloadPolicy() if on_gpu else OffloadPolicy(),
    }
    for block in [*model.encoder.block, *model.decoder.block]:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)

    def train_step(batch: Batch) -> torch.Tensor:
        losses = []
        for part in micro_batches(batch, args.micro_batches):
            loss = model(**part).loss
            (loss / args.micro_batches).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return train_step, None


VARIANTS = {
    "no offload": variant("none", "none"),
    "cpu": variant("cpu", "cpu"),
    "cpu, 8-bit": variant("cpu", "cpu", coded=True),
    "cpu, half": variant("cpu", "cpu", ratio=0.5),
    "nvme": variant("nvme", "nvme", overlap_step=False),
    "nvme, behind": variant(
        "nvme", "nvme", overlap_step=True, pipeline_read=True, pipeline_write=True
    ),
    "nvme, 8-bit": variant(
        "nvme", "nvme", coded=True, overlap_step=True, pipeline_read=True, pipeline_write=True
    ),
    "fsdp2": fsdp2,
    "deepspeed cpu": deepspeed,
}


# -- measurements


def of_this_process(path: str) -> dict[str, int]:
    """Read a file of lines `name: number`, such as /proc/self/io (bytes) and /proc/self/status
    (kB).
    """
    lines = (line.split(":", 1) for line in Path(path).read_text().splitlines())
    return {
        name: int(words[0])
        for name, text in lines
        if (words := text.split()) and words[0].isdigit()
    }


def forget_peaks() -> None:
    """Reset the peaks of memory. Memory that building needed is first given back to the system."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
    Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def moved(engine: Any) -> dict[str, int]:
    """Return elements gathered and reduced, and bytes read and written on disks, by this process so
    far.
    """
    if engine is not None:
        engine.optimizer.wait()  # for updates of the last step that still run
    storage, elements = (
        of_this_process("/proc/self/io"),
        engine.comm.elements if engine is not None else {},
    )
    return {
        "gathered": elements.get("all_gather", 0),
        "reduced": elements.get("reduce_scatter", 0),
        "read": storage["read_bytes"],
        "written": storage["write_bytes"],
    }


def batches_of(args: argparse.Namespace, seed: int) -> Iterator[Batch]:
    vocabulary = MODELS[args.model]["vocab_size"]
    for batch in synthetic_batches(vocabulary, args.batch, args.length, args.length, seed):
        yield {name: value.to(compute_device()) for name, value in batch.items()}


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train.

    Return losses, wall and CPU seconds of the counted steps, peaks of memory, bytes and waits of a
    step.
    """
    model = build_t5(MODELS[args.model], BUILD_SEED)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    train_step, engine = VARIANTS[args.variant](model, args)
    batches = batches_of(args, seed=dist.get_rank())
    losses = [train_step(batch).item() for batch in islice(batches, args.warmup)]
    forget_peaks()
    before, seconds, cpu = moved(engine), [], time.process_time()
    if engine is not None:
        engine.comm.clock.reset()
    for batch in islice(batches, args.steps):
        synchronize()
        begin = time.perf_counter()
        losses.append(train_step(batch).item())
        synchronize()
        seconds.append(time.perf_counter() - begin)
    cpu = time.process_time() - cpu
    clock = engine.comm.clock if engine is not None else None
    waits = (
        {f"{phase}: {what}": spent for (phase, what), spent in clock.waits.items()} if clock else {}
    )
    phases = dict(clock.phases) if clock else {}
    after = moved(engine)
    return {
        "parameters": parameters,
        "item": compute_dtype().itemsize,
        "losses": losses,
        "seconds": seconds,
        "cpu": cpu / args.steps,
        "host": of_this_process("/proc/self/status")["VmHWM"] << 10,
        "device": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        "moved": {name: (after[name] - before[name]) / args.steps for name in after}
        if engine is not None
        else None,
        "phases": {name: spent / args.steps for name, spent in phases.items()},
        "waits": {name: spent / args.steps for name, spent in waits.items()},
    }


# -- lower bounds


def compute_seconds(args: argparse.Namespace) -> tuple[float, float]:
    """Return the median seconds of plain torch's forward and backward, and the mean CPU seconds."""
    model = build_t5(MODELS[args.model], BUILD_SEED).to(compute_device(), compute_dtype())
    seconds, cpu = [], []
    for batch in islice(batches_of(args, seed=0), args.warmup + args.steps):
        synchronize()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        model(**batch).loss.backward()
        synchronize()
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - cpu_begin)
        model.zero_grad()
    return statistics.median(seconds[args.warmup :]), statistics.mean(cpu[args.warmup :])


def fastest(move: Callable[[], object], nbytes: int) -> float:
    """Return bytes per second of the fastest of several tries."""
    seconds = []
    for _ in range(TRIES):
        synchronize()
        begin = time.perf_counter()
        move()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return nbytes / min(seconds)


def triad() -> float:
    """Measure host memory with two fp32 reads and a write on all cores."""
    a, b, out = (torch.ones(TRIAD_NUMEL) for _ in range(3))
    with threads(os.cpu_count() or 1):
        return fastest(lambda: torch.add(a, b, alpha=0.5, out=out), 3 * a.nbytes)


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


def disk(folder: Path) -> tuple[float, float]:
    """Measure reads and writes through `ScratchFile`, with all pieces in flight."""
    from zero.offload.nvme import ScratchFile
    from zero.offload.pinned import HostMemory

    file, memory = ScratchFile(folder), HostMemory()
    tensors = [file.empty(PIECE // 4, torch.float32) for _ in range(PIECES)]
    buffers = [memory.like(tensor).fill_(1.0) for tensor in tensors]

    def move(start: Callable) -> None:
        for transfer in [
            start(tensor, buffer) for tensor, buffer in zip(tensors, buffers, strict=True)
        ]:
            transfer.wait()

    written = fastest(lambda: move(file.write), PIECES * PIECE)
    return fastest(lambda: move(file.read), PIECES * PIECE), written


def pcie() -> tuple[float, float]:
    """Measure copies to and from the GPU, with pinned memory."""
    host = torch.ones(4 * PIECE, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=compute_device())
    to_device = fastest(lambda: there.copy_(host, non_blocking=True), host.nbytes)
    return to_device, fastest(lambda: host.copy_(there, non_blocking=True), host.nbytes)


def floor(args: argparse.Namespace) -> dict[str, Any]:
    """Return wall and CPU seconds of plain compute, and bytes per second of memory, a file, and GPU
    copies.
    """
    read, written = disk(args.folder)
    compute, cpu = compute_seconds(args)
    found = {
        "compute": compute,
        "compute_cpu": cpu,
        "triad": triad(),
        "read": read,
        "written": written,
    }
    if torch.cuda.is_available():
        found["to_device"], found["from_device"] = pcie()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=["floor", *VARIANTS], required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for name in ("batch", "length", "warmup", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a batch")
    parser.add_argument("--slices", type=int, default=1, help="of a batch, with this engine")
    parser.add_argument("--live", type=int, help="stage3_max_live_parameters, with this engine")
    parser.add_argument("--checkpointing", action="store_true", help="recompute blocks in backward")
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(compute_device())
    report(floor(args) if args.variant == "floor" else train(args))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
