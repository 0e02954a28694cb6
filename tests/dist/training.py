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
from tests.processes import run_on
from tests.tolerance import rounding

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


# Makes an optimizer of param groups.
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def master_dtype(param: torch.Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train_plain(
    model: nn.Module,
    batches: Iterable[Batch],
    clip: float = 0.0,
    grouping: Grouping = one_group,
    make: Make = adamw,
) -> Curve:
    """The training loop that everybody knows, on whole global batches."""
    curve = Curve()
    params = [param for _, param in trainable(model)]
    optimizer = make(grouping(trainable(model)))
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


Gradients = dict[str, torch.Tensor]


def _gradients(model: nn.Module, part: Batch, accumulation: int, scale: float) -> tuple[float, Gradients]:
    """Loss and fp32 gradients of one micro-batch; a parameter without one has zeros."""
    loss = loss_of(model(**part))
    ((loss / accumulation if accumulation > 1 else loss).float() * scale).backward()
    found = {}
    for name, param in trainable(model):
        grad, param.grad = torch.zeros_like(param) if param.grad is None else param.grad, None
        found[name] = grad.to(master_dtype(param))
    return loss.item(), found


def _added(terms: Sequence[Gradients]) -> Gradients:
    total = {name: grad.clone() for name, grad in terms[0].items()}
    for term in terms[1:]:
        for name, grad in term.items():
            total[name].add_(grad)
    return total


def train_in_slices(
    model: nn.Module,
    batches: Iterable[Batch],
    ranks: int,
    accumulation: int = 1,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    clip: float = 0.0,
    norms: Sequence[float] | None = None,
    own_first: bool = False,
    shard_size: int = 1,
    grouping: Grouping = one_group,
    make: Make = adamw,
) -> Curve:
    """Data-parallel mixed precision spelled out in one process: the shapes and the order of sums of `ranks` ranks.

    The model computes in `dtype`; each of `ranks * accumulation` parts of a batch gives gradients in that dtype, of its
    loss, divided by `accumulation` and times `scale` (which is not the same in fp16, where small gradients are
    subnormal). They are summed in fp32 (float64 of a float64 model): in the order of micro-batches and, within one, of
    ranks, or with `own_first` first each rank's own, as stages 0 and 1 do. Those of `shard_size` consecutive ranks are
    summed first, and then these sums. Their mean updates the masters, in the same dtype, which are rounded back into
    the model.

    `norms` are those by which clipping divides, step by step, if not this run's own: a norm's last bit depends on how
    parameters are cut, and every weight on that bit.
    """
    curve = Curve()
    for param in model.parameters():
        param.data = param.data.to(dtype or param.dtype)
    masters = {
        name: nn.Parameter(param.detach().to(master_dtype(param), copy=True)) for name, param in trainable(model)
    }
    optimizer = make(grouping(list(masters.items())))
    for number, batch in enumerate(batches):
        found = [_gradients(model, part, accumulation, scale) for part in split(batch, ranks * accumulation)]
        grads = [grad for _, grad in found]
        if own_first:
            grads = [_added(grads[rank::ranks]) for rank in range(ranks)]
        grads = [_added(grads[first : first + shard_size]) for first in range(0, len(grads), shard_size)]
        total, factor = _added(grads), 1.0 / ranks / scale
        norm = torch.nn.utils.get_total_norm(list(total.values())).item() * factor
        curve.losses.append([loss for loss, _ in found])
        curve.norms.append(norm)
        if clip:
            factor *= min(1.0, clip / ((norm if norms is None else norms[number]) + 1e-6))
        for name, master in masters.items():
            master.grad = total[name].mul_(factor)
        optimizer.step()
        with torch.no_grad():
            for name, param in trainable(model):
                param.copy_(masters[name])
    curve.weights = weights_of(model)
    return curve


def ds_config(*, accumulation: int = 1, clip: float = 0.0, **sections: Any) -> dict[str, Any]:
    """A configuration for stage 3; keywords that begin with no section's name belong to `zero_optimization`."""
    named = ("fp16", "bf16", "optimizer", "scheduler", "communication_data_type", "activation_checkpointing")
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
    model: nn.Module, config: dict[str, Any], grouping: Grouping = one_group, make: Make = adamw
) -> tuple[zero.ZeroEngine, torch.optim.Optimizer]:
    engine, optimizer, _, _ = zero.initialize(model=model, optimizer=make(grouping(trainable(model))), config=config)
    return engine, optimizer


def step(engine: zero.ZeroEngine, parts: Sequence[Batch]) -> list[float]:
    """One optimizer step over this rank's micro-batches; their losses."""
    losses = []
    for part in parts:
        loss = loss_of(engine(**{name: value.to(engine.comm.device) for name, value in part.items()}))
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


def curve_on(world_size: int, fn: Callable[..., Curve], *args: Any, **device: bool) -> Curve:
    """Run `fn(rank, world_size, *args)` on all ranks, as `run_on` does, and put their curves together."""
    return together(run_on(world_size, fn, *args, **device))


def together(curves: Sequence[Curve]) -> Curve:
    """One curve of those of all ranks."""
    assert all(curve.norms == curves[0].norms for curve in curves), "ranks report different norms"
    losses = [
        [loss for micro in zip(*of_ranks, strict=True) for loss in micro]
        for of_ranks in zip(*(curve.losses for curve in curves), strict=True)
    ]
    return Curve(losses, curves[0].norms, curves[0].weights)


def relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative deviation."""
    return max((abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)), default=0.0)


def assert_equal(found: Curve, expected: Curve) -> None:
    """Bit for bit: losses, norms and weights."""
    assert found.norms == expected.norms
    assert_same_training(found, expected)


def assert_same_training(found: Curve, expected: Curve) -> None:
    """Losses and weights bit for bit; norms, of the same gradients, within rounding.

    A parameter that lies on several ranks has its squares summed in as many parts.
    """
    assert found.losses == expected.losses
    assert_same_weights(found.weights, expected.weights)
    longest = max(value.numel() for value in expected.weights.values())
    assert relative(found.norms, expected.norms) <= rounding(torch.float32, longest)


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
