"""Training the same model on the same global batches under plain torch and under the engine.

A *curve* is what a run reports: for each step the losses of all micro-batches on all ranks, in the order in which a
single process would see them, and the gradient norm before clipping; and the weights at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import zero
from tests.dist.pool import run_on

# Adam divides by the gradient's own size, so it blows up rounding noise where the true gradient is zero (the bias of
# attention keys). At 5e-3 GPT-2's norms part by 1e-3 within 20 steps; at 1e-3 everything stays within 2e-7.
LR = 1e-3
WEIGHT_DECAY = 0.1

Batch = dict[str, torch.Tensor]
# Turns the trainable parameters with their names into what an optimizer takes.
Grouping = Callable[[list[tuple[str, nn.Parameter]]], list[dict[str, Any]]]


@dataclass
class Curve:
    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def mean_losses(self) -> list[float]:
        return [sum(step) / len(step) for step in self.losses]


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output["loss"]


def split(batch: Batch, parts: int) -> list[Batch]:
    chunks = {name: value.chunk(parts) for name, value in batch.items()}
    return [{name: chunk[i] for name, chunk in chunks.items()} for i in range(parts)]


def one_group(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    return [{"params": [param for _, param in named]}]


def two_groups(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """Matrices decay; vectors do not and learn ten times as fast."""
    return [
        {"params": [param for _, param in named if param.dim() > 1]},
        {"params": [param for _, param in named if param.dim() <= 1], "weight_decay": 0.0, "lr": 10 * LR},
    ]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=LR, weight_decay=WEIGHT_DECAY)


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_plain(
    model: nn.Module,
    batches: Iterable[Batch],
    clip: float = 0.0,
    grouping: Grouping = one_group,
) -> Curve:
    """The training loop that everybody knows, on whole global batches."""
    curve = Curve()
    params = [param for _, param in trainable(model)]
    optimizer = adamw(grouping(trainable(model)))
    for batch in batches:
        loss = loss_of(model(**batch))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append([loss.item()])
        curve.norms.append(norm.item())
    curve.weights = weights_of(model)
    return curve


def train_in_slices(
    model: nn.Module,
    batches: Iterable[Batch],
    slices: int,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    clip: float = 0.0,
    grouping: Grouping = one_group,
) -> Curve:
    """Data-parallel mixed precision spelled out in one process.

    The model computes in `dtype`; each of `slices` parts of a batch gives gradients in that dtype, of a loss times
    `scale`; their fp32 sum over the slices, in order, updates fp32 masters, which are rounded back into the model.
    """
    curve = Curve()
    for param in model.parameters():
        param.data = param.data.to(dtype or param.dtype)
    masters = {name: nn.Parameter(param.detach().float().clone()) for name, param in trainable(model)}
    optimizer = adamw(grouping(list(masters.items())))
    for batch in batches:
        losses = []
        for part in split(batch, slices):
            loss = loss_of(model(**part))
            (loss.float() * scale).backward()
            losses.append(loss.item())
            for name, param in trainable(model):
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                master, param.grad = masters[name], None
                master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
        for master in masters.values():
            master.grad.mul_(1.0 / slices / scale)
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters.values()]).item()
        if clip and norm > clip:
            for master in masters.values():
                master.grad.mul_(clip / (norm + 1e-6))
        curve.losses.append(losses)
        curve.norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, param in trainable(model):
                param.copy_(masters[name])
    curve.weights = weights_of(model)
    return curve


def ds_config(*, accumulation: int = 1, clip: float = 0.0, **sections: Any) -> dict[str, Any]:
    """A configuration for stage 3; keywords that begin with no section's name belong to `zero_optimization`."""
    named = ("fp16", "bf16", "optimizer", "scheduler", "communication_data_type")
    top = {key: value for key, value in sections.items() if key in named}
    stage3 = {key: value for key, value in sections.items() if key not in named}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, **stage3},
        **top,
    }


def start(
    model: nn.Module, config: dict[str, Any], grouping: Grouping = one_group
) -> tuple[zero.ZeroEngine, torch.optim.Optimizer]:
    engine, optimizer, _, _ = zero.initialize(model=model, optimizer=adamw(grouping(trainable(model))), config=config)
    return engine, optimizer


def step(engine: zero.ZeroEngine, parts: Sequence[Batch]) -> list[float]:
    """One optimizer step over this rank's micro-batches; their losses."""
    losses = []
    for part in parts:
        loss = loss_of(engine(**part))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_zero(engine: zero.ZeroEngine, batches: Iterable[Batch]) -> Curve:
    """This rank's part of each batch. Every rank gets its own losses; rank 0 alone gets the weights."""
    curve = Curve()
    accumulation = engine.settings.gradient_accumulation_steps
    for batch in batches:
        parts = split(batch, engine.comm.world_size * accumulation)
        curve.losses.append(step(engine, parts[engine.comm.rank :: engine.comm.world_size]))
        curve.norms.append(engine.get_global_grad_norm())
    curve.weights = engine._zero3_consolidated_16bit_state_dict() or {}
    return curve


def curve_on(world_size: int, fn: Callable[..., Curve], *args: Any) -> Curve:
    """Run `fn(rank, world_size, *args)` on all ranks and put their curves together."""
    curves = run_on(world_size, fn, *args)
    assert all(curve.norms == curves[0].norms for curve in curves), "ranks report different norms"
    losses = [
        [loss for micro in zip(*of_ranks, strict=True) for loss in micro]
        for of_ranks in zip(*(curve.losses for curve in curves), strict=True)
    ]
    return Curve(losses, curves[0].norms, curves[0].weights)


def relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative deviation."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def assert_equal(found: Curve, expected: Curve) -> None:
    """Bit for bit: losses, norms and weights."""
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert_same_weights(found.weights, expected.weights)


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def assert_close(found: Curve, expected: Curve, tolerance: float = 1e-6) -> None:
    """Mean losses and norms within `tolerance`, relative."""
    assert relative(found.mean_losses(), expected.mean_losses()) <= tolerance
    assert relative(found.norms, expected.norms) <= tolerance
