"""One rank of one variant of the step benchmark: trains a T5 on synthetic batches and reports the
cost of each step.

`benchmarks.step` starts it on each rank, in this environment or (variant `deepspeed`) in one that
has DeepSpeed. A variant is a function from a plain model to `train_step(batch) -> loss`. All use
torch's fused AdamW, and clip gradients to a global norm of 1.0."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.launch import report
from benchmarks.models import T5_42M, build_t5, synthetic_batches

LEARNING_RATE = 1e-4
CLIP = 1.0
BUILD_SEED = 1

TrainStep = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def ddp(model: nn.Module, args: argparse.Namespace) -> TrainStep:
    """DistributedDataParallel. bf16: autocast over fp32 parameters, with an fp32 all-reduce."""
    dist.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(wrapped)

    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = wrapped(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def fsdp2(model: nn.Module, args: argparse.Namespace) -> TrainStep:
    """`fully_shard` on each T5 block and on the root, resharded after forward. bf16: its
    mixed-precision policy.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    dtype = torch.bfloat16 if args.dtype == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for block in [*model.encoder.block, *model.decoder.block]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = adamw(model)

    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def _initialized(
    package: Any, model: nn.Module, args: argparse.Namespace, zero: dict[str, Any]
) -> TrainStep:
    """Return the step of an engine with DeepSpeed's interface.

    `package`: `zero` or the real `deepspeed`.
    """
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 3, **zero},
        # torch's fused AdamW is not in DeepSpeed's list of tested optimizers.
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": args.dtype == "bf16"},
    }
    package.comm.init_distributed(dist_backend="gloo")
    engine, *_ = package.initialize(model=model, optimizer=adamw(model), config=config)

    def train_step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss

    return train_step


def zero3(model: nn.Module, args: argparse.Namespace) -> TrainStep:
    """This engine at stage 3 with DeepSpeed's default limits: groups may stay gathered from forward
    to backward.
    """
    import zero

    return _initialized(zero, model, args, {})


def zero3_strict(model: nn.Module, args: argparse.Namespace) -> TrainStep:
    """This engine at stage 3.

    Every group is resharded after each use, in forward and in backward.
    """
    import zero

    return _initialized(
        zero, model, args, {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    )


def deepspeed(model: nn.Module, args: argparse.Namespace) -> TrainStep:
    """DeepSpeed at stage 3 with default limits."""
    import deepspeed

    return _initialized(deepspeed, model, args, {})


def deepspeed_strict(model: nn.Module, args: argparse.Namespace) -> TrainStep:
    """DeepSpeed at stage 3, with limits that ask for a release after each use."""
    import deepspeed

    return _initialized(
        deepspeed, model, args, {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    )


VARIANTS = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "zero3": zero3,
    "zero3-strict": zero3_strict,
    "deepspeed": deepspeed,
    "deepspeed-strict": deepspeed_strict,
}


def measure(train_step: TrainStep, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return wall, user and system seconds of one step of this process (all threads), its loss, and
    RSS (MB).
    """
    dist.barrier()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    loss = train_step(batch)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "loss": loss.item(),
        "wall": wall,
        "user": after.ru_utime - before.ru_utime,
        "system": after.ru_stime - before.ru_stime,
        "rss": psutil.Process().memory_info().rss / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()

    imported = psutil.Process().memory_info().rss / 1e6
    model = build_t5(T5_42M, BUILD_SEED)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    train_step = VARIANTS[args.variant](model, args)
    batches = synthetic_batches(
        T5_42M["vocab_size"], args.batch, args.length, args.length, seed=dist.get_rank()
    )
    steps = [measure(train_step, batch) for batch in islice(batches, args.warmup + args.steps)]
    # kilobytes on Linux, bytes on macOS
    peak = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024)
        / 1e6
    )
    report({"parameters": parameters, "rss_imported": imported, "rss_peak": peak, "steps": steps})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
