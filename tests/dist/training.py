"""Trains the same model on the same global batches, in plain torch and with the engine.

A run reports a *curve*. For each step it has the gradient norm before clipping, and the losses of
all micro-batches on all ranks, in the order of a single process. At the end come the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import zero
from tests.processes import run_on
from tests.tolerance import assert_close, rounding
from zero.config import Config
from zero.fragments import safe_get_full_grad

LR = 1e-3
WEIGHT_DECAY = 0.1

Batch = dict[str, torch.Tensor]
# From the named trainable parameters to the param groups of an optimizer.
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
    """Two param groups: matrices have weight decay, vectors have none and ten times the learning
    rate.
    """
    return [
        {"params": [param for _, param in named if param.dim() > 1]},
        {
            "params": [param for _, param in named if param.dim() <= 1],
            "weight_decay": 0.0,
            "lr": 10 * LR,
        },
    ]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Take torch's step. A fused one gets each tensor flat and with zeros behind it.

    torch computes whole vectors of at most 16 elements in fp32, and what is left at the end of a
    tensor partly in float64. The engine computes all elements as torch computes those in vectors.
    """
    given = []
    for group in optimizer.param_groups:
        for param in group["params"] if group.get("fused") else ():
            if param.grad is not None:
                given.append((param, param.data, param.grad))
                param.grad = None
                param.data, grad = (
                    functional.pad(each.flatten(), (0, 16)) for each in given[-1][1:]
                )
                param.grad = grad
    optimizer.step()
    for param, data, grad in given:
        param.grad = None
        param.data = data.copy_(param.data[: data.numel()].view_as(data))
        param.grad = grad


# From param groups to an optimizer.
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
    """Train with a plain loop on whole global batches."""
    curve = Curve()
    params = [param for _, param in trainable(model)]
    optimizer = make(grouping(trainable(model)))
    for batch in batches:
        loss = loss_of(model(**batch))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, clip or float("inf"))
        take_step(optimizer)
        optimizer.zero_grad()
        curve.losses.append([loss.item()])
        curve.norms.append(norm.item())
    curve.weights = weights_of(model)
    return curve


Gradients = dict[str, torch.Tensor]


def _gradients(
    model: nn.Module, part: Batch, accumulation: int, scale: float
) -> tuple[float, Gradients]:
    """Return loss and fp32 gradients of one micro-batch, of the parameters that have one."""
    loss = loss_of(model(**part))
    ((loss / accumulation if accumulation > 1 else loss).float() * scale).backward()
    found = {}
    for name, param in trainable(model):
        if param.grad is not None:
            found[name], param.grad = param.grad.to(master_dtype(param)), None
    return loss.item(), found


def _added(terms: Sequence[Gradients]) -> Gradients:
    total: Gradients = {}
    for term in terms:
        for name, grad in term.items():
            total[name] = total[name].add_(grad) if name in total else grad.clone()
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
    """Train as `ranks` ranks in mixed precision do, but in one process: with their shapes and their
    order of sums.

    A batch has `ranks * accumulation` parts. Each part gives gradients in `dtype`, of its loss /
    `accumulation` x `scale`. (In fp16 the scale changes gradients: small ones are subnormal.)
    Gradients are summed in fp32, of a float64 model in float64: micro-batch by micro-batch, and
    within one rank by rank. With `own_first` each rank's own gradients are summed first, as at
    stages 0 and 1. The gradients of `shard_size` consecutive ranks are summed before these sums
    are. Their mean updates the masters, which begin with the model's fp32 values and are rounded
    into it.

    `norms`: clipping divides by these, step by step, in place of this run's own. The last bit of a
    norm depends on how parameters are cut, and all weights depend on that bit."""
    curve = Curve()
    masters = {
        name: nn.Parameter(param.detach().to(master_dtype(param), copy=True))
        for name, param in trainable(model)
    }
    wide = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, param in model.named_parameters():
        if not any(part in name for part in wide):
            param.data = param.data.to(dtype or param.dtype)
    optimizer = make(grouping(list(masters.items())))
    for number, batch in enumerate(batches):
        found = [
            _gradients(model, part, accumulation, scale)
            for part in split(batch, ranks * accumulation)
        ]
        grads = [grad for _, grad in found]
        if own_first:
            grads = [_added(grads[rank::ranks]) for rank in range(ranks)]
        grads = [
            _added(grads[first : first + shard_size]) for first in range(0, len(grads), shard_size)
        ]
        total, factor = _added(grads), 1.0 / ranks / scale
        norm = torch.nn.utils.get_total_norm(list(total.values())).item() * factor
        curve.losses.append([loss for loss, _ in found])
        curve.norms.append(norm)
        if clip:
            factor *= min(1.0, clip / ((norm if norms is None else norms[number]) + 1e-6))
        for name, master in masters.items():
            master.grad = total[name].mul_(factor) if name in total else None
        take_step(optimizer)
        with torch.no_grad():
            for name, param in trainable(model):
                param.copy_(masters[name])
    curve.weights = weights_of(model)
    return curve


def ds_config(*, accumulation: int = 1, clip: float = 0.0, **keys: Any) -> dict[str, Any]:
    """Return a configuration for stage 3.

    Keywords that name no key of the top level are keys of `zero_optimization`.
    """
    top = {key: value for key, value in keys.items() if key in Config.model_fields}
    stage3 = {key: value for key, value in keys.items() if key not in top}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {
            "stage": 3,
            "stage3_gather_16bit_weights_on_model_save": True,
            **stage3,
        },
        **top,
    }


def start(
    model: nn.Module, config: dict[str, Any], grouping: Grouping = one_group, make: Make = adamw
) -> tuple[zero.ZeroEngine, torch.optim.Optimizer]:
    engine, optimizer, _, _ = zero.initialize(
        model=model, optimizer=make(grouping(trainable(model))), config=config
    )
    return engine, optimizer


def sgd_engine(
    model: nn.Module, lr: float = 0.1, momentum: float = 0.0, **section: Any
) -> zero.ZeroEngine:
    """An engine with SGD, of whose parameters none persists unless `section` says so.

    `section`: as for `ds_config`.
    """
    config = ds_config(**{"stage3_param_persistence_threshold": 0} | section)
    return start(model, config, make=partial(torch.optim.SGD, lr=lr, momentum=momentum))[0]


def noise(step: int, rank: int, rows: int, width: int) -> torch.Tensor:
    """The input of one rank in one step, which every process can make."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(10 * step + rank))


def step(engine: zero.ZeroEngine, parts: Sequence[Batch]) -> list[float]:
    """Take one optimizer step over this rank's micro-batches, and return their losses."""
    losses = []
    for part in parts:
        loss = loss_of(
            engine(**{name: value.to(engine.comm.device) for name, value in part.items()})
        )
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_zero(engine: zero.ZeroEngine, batches: Iterable[Batch]) -> Curve:
    """Train on this rank's part of each batch.

    Each rank returns its own losses; only rank 0 returns the weights.
    """
    curve = Curve()
    accumulation = engine.settings.gradient_accumulation_steps
    for batch in batches:
        parts = split(batch, engine.comm.world_size * accumulation)
        curve.losses.append(step(engine, parts[engine.comm.rank :: engine.comm.world_size]))
        curve.norms.append(engine.get_global_grad_norm())
    curve.weights = engine._zero3_consolidated_16bit_state_dict() or {}
    return curve


def curve_on(world_size: int, fn: Callable[..., Curve], *args: Any, **device: bool) -> Curve:
    """Run `fn(rank, world_size, *args)` on all ranks, as `run_on` does, and merge their curves."""
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
    """Return the largest relative difference."""
    return max((abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)), default=0.0)


def assert_equal(found: Curve, expected: Curve) -> None:
    """Compare losses, norms and weights bit for bit."""
    assert found.norms == expected.norms
    assert_same_training(found, expected)


def assert_same_training(found: Curve, expected: Curve) -> None:
    """Compare losses and weights bit for bit, and norms within rounding.

    The norms are of the same gradients. But the squares of a parameter on several ranks are summed
    in several parts."""
    assert found.losses == expected.losses
    assert_same_weights(found.weights, expected.weights)
    longest = max(value.numel() for value in expected.weights.values())
    assert relative(found.norms, expected.norms) <= rounding(torch.float32, longest)


def assert_close_to(
    model: nn.Module, reference: nn.Module, terms: int, steps: int, what: object = ""
) -> None:
    """Assert that a sharded model has the values of `reference` within rounding, as
    `tests.tolerance.assert_close` does.
    """
    with zero.GatheredParameters(model.parameters()):
        for (name, param), expected in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert_close(param.detach(), expected.detach(), terms, steps, f"{what} {name}")


def assert_gradients(
    model: nn.Module, reference: nn.Module, ranks: int, terms: int, steps: int = 1
) -> None:
    """Assert that a model of an engine has the gradients of `reference`, whose losses were summed
    over so many ranks, within rounding. No gradient is one of zeros.
    """
    for (name, param), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
        expected = torch.zeros_like(plain) if plain.grad is None else plain.grad / ranks
        assert_close(safe_get_full_grad(param), expected, terms, steps, name)


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
