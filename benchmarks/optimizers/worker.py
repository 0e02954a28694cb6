"""One rank of one system of the optimizer benchmark: trains a small Llama with several optimizers,
at several stages.

`benchmarks.optimizers` calls `run_all` on each rank, in this environment or (system `deepspeed`) in
one that has DeepSpeed. All systems train in fp32 on the same global batches, without clipping."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from benchmarks.measuring import timed
from benchmarks.models import build, llama
from benchmarks.runner import medians
from benchmarks.step.worker import by_engine

# 7.4M parameters; 56 of its matrices, 6.3M parameters, belong to Muon.
VOCABULARY, LENGTH = 2048, 32
SIZES = 256, 688, 8, 4, VOCABULARY
LR, MUON_LR = 1e-3, 0.02
MUON = {
    "type": "Muon",
    "params": {"lr": MUON_LR, "adam_lr": LR, "momentum": 0.95, "weight_decay": 0.0},
}
ADAM = {"betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}  # beside Muon; DeepSpeed's values
Batch = dict[str, torch.Tensor]


class Trained(NamedTuple):
    """A model in training. `step`: trains on this rank's rows, gives their loss. `state`: the
    optimizer's, as this rank has it. `end`: frees what the system holds.
    """

    step: Callable[[Batch], torch.Tensor]
    state: Callable[[], Any]
    end: Callable[[], object] = lambda: None


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)]


def adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(model.parameters(), lr=1e-2)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's Muon for the matrices of blocks, and its AdamW for the rest."""
    hidden = [param for name, param in model.named_parameters() if "_proj" in name]
    others = [param for name, param in model.named_parameters() if "_proj" not in name]
    return [
        torch.optim.Muon(hidden, lr=MUON_LR, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=LR, **ADAM),
    ]


def torchao_8bit(model: nn.Module) -> list[torch.optim.Optimizer]:
    from torchao.optim import AdamW8bit

    return [AdamW8bit(model.parameters(), lr=LR, weight_decay=0.0)]


def bitsandbytes_8bit(model: nn.Module) -> list[torch.optim.Optimizer]:
    from bitsandbytes.optim import AdamW8bit

    return [AdamW8bit(model.parameters(), lr=LR, weight_decay=0.0)]


OPTIMIZERS = {
    "AdamW": adamw,
    "Adafactor": adafactor,
    "Muon": muon,
    "AdamW 8-bit (torchao)": torchao_8bit,
    "AdamW 8-bit (bitsandbytes)": bitsandbytes_8bit,
}


def in_torch(model: nn.Module, name: str, stage: int | None) -> Trained:
    """Plain torch in one process on whole batches, or FSDP2 at a stage: `fully_shard` on each block
    and on the root. Stage 2: parameters stay gathered from forward to backward.
    """
    if stage is not None:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in [*model.model.layers, model]:
            fully_shard(part, mesh=mesh, reshard_after_forward=stage == 3)
    optimizers = OPTIMIZERS[name](model)

    def step(batch: Batch) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Trained(step, lambda: [list(optimizer.state.values()) for optimizer in optimizers])


def by_package(package: str, model: nn.Module, name: str, stage: int) -> Trained:
    """This engine, or DeepSpeed, whose Muon demands that gradients are not reduce-scattered."""
    section: dict[str, Any] = {"stage": stage}
    if package == "deepspeed" and name == "Muon":
        section["reduce_scatter"] = False
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": section,
    }
    if name == "Muon":
        given: dict[str, Any] = {"model_parameters": model.parameters()}
        config["optimizer"] = MUON
    else:
        given = {"optimizer": OPTIMIZERS[name](model)[0]}
    library = importlib.import_module(package)
    engine = library.initialize(model=model, config=config, **given)[0]

    def state() -> Any:
        own = engine.optimizer if package == "zero" else engine.optimizer.optimizer
        return list(own.state.values())

    return Trained(by_engine(engine), state, engine.destroy)


def nbytes(state: Any) -> int:
    """Bytes of all tensors in a state that this rank holds: of a DTensor its local part, of a
    wrapper what it wraps.
    """
    total = 0
    for value in tree_leaves(state):
        if isinstance(value, dist.tensor.DTensor):
            total += nbytes(value.to_local())
        elif is_traceable_wrapper_subclass(value):
            total += nbytes([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif isinstance(value, torch.Tensor):
            total += value.nbytes
    return total


def batches(rows: int, count: int) -> Iterator[Batch]:
    """Yield this rank's part of global batches of random tokens, (rows, LENGTH)."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
        own = ids.chunk(dist.get_world_size())[dist.get_rank()]
        yield {"input_ids": own, "labels": own}


def measure(
    system: str, name: str, stage: int, rows: int, warmup: int, steps: int
) -> dict[str, Any]:
    """CPU (all threads) and wall seconds of a counted step, the losses of all steps, and bytes of
    state per parameter.
    """
    model = build(llama(*SIZES, tie_word_embeddings=False))
    parameters = sum(param.numel() for param in model.parameters())
    if system in ("plain", "fsdp2"):
        trained = in_torch(model, name, stage if system == "fsdp2" else None)
    else:
        trained = by_package("zero" if system == "ours" else system, model, name, stage)
    each = [timed(lambda b=b: trained.step(b)) for b in batches(rows, warmup + steps)]
    found = medians([costs for costs, _ in each[warmup:]])
    state = nbytes(trained.state()) / parameters
    trained.end()
    return found | {"state": state, "losses": [loss.item() for _, loss in each]}


def outcome(system: str, name: str, stage: int, task: dict[str, int]) -> dict[str, Any]:
    """What `measure` finds. If a system cannot do it, the table says why, and the others go on."""
    try:
        return measure(system, name, stage, **task)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {lines[0]}"}


def run_all(
    system: str, optimizers: list[str], stages: list[int], **task: int
) -> list[dict[str, Any]]:
    if system == "deepspeed":
        importlib.import_module("deepspeed").init_distributed(dist_backend="gloo")
    else:
        dist.init_process_group("gloo")
    cases = product(optimizers, stages)
    return [outcome(system, name, stage, task) for name, stage in cases]
