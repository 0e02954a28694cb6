"""Odd losses and odd blocks, of which a batch is split: `"on_out_of_memory": "adapt"` and
`batch_slices` give the numbers of plain torch, or refuse.

A recipe is one of transformers' models with something of a script in it. From the second step on,
the memory of an engine is full until its batch runs in slices."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

import zero
from tests.dist.training import ds_config
from tests.parity.models import VOCABULARY, build
from zero.engine import ZeroEngine
from zero.errors import UsageError

STEPS, ROWS, LENGTH, LR = 4, 6, 7, 0.05
RARE = 5  # a token that only the last batch has

Change = Callable[[Any], None]


def _with_forward(model: Any, forward: Callable[..., Any]) -> None:
    """Give the model a class of the script."""
    kind = type(model)

    def own(self: Any, **given: Any) -> Any:
        return forward(self, lambda **inner: kind.forward(self, **inner), given)

    model.__class__ = type("OfScript", (kind,), {"forward": own, "__module__": __name__})


def weighted_tokens(model: Any) -> None:
    """A mean weighted by token."""

    def forward(self: Any, run: Callable[..., Any], given: dict[str, Any]) -> Any:
        output, weights = run(**given), torch.ones(VOCABULARY)
        weights[RARE] = 30.0
        classes, labels = output.logits.flatten(0, 1), given["labels"].flatten()
        output.loss = nn.functional.cross_entropy(classes, labels, weights)
        return output

    _with_forward(model, forward)


def counting(model: Any) -> None:
    model.register_buffer("count", torch.zeros(()))

    def forward(self: Any, run: Callable[..., Any], given: dict[str, Any]) -> Any:
        self.count += 1
        output = run(**given)
        output.loss = output.loss * (1 + 0.1 * self.count)
        return output

    _with_forward(model, forward)


def drawing(model: Any) -> None:
    """Draws from a generator that nothing else knows."""
    generator = torch.Generator().manual_seed(1)

    def forward(self: Any, run: Callable[..., Any], given: dict[str, Any]) -> Any:
        output = run(**given)
        output.loss = output.loss * (1 + torch.rand((), generator=generator))
        return output

    _with_forward(model, forward)


def second_scalar(model: Any) -> None:
    def forward(self: Any, run: Callable[..., Any], given: dict[str, Any]) -> Any:
        output = run(**given)
        return {"loss": output.loss, "second": output.logits.square().mean()}

    _with_forward(model, forward)


def own_loss_function(model: Any) -> None:
    """The same for all samples, however many labels they have."""

    def loss(logits: Any, labels: Any, *_: Any, **__: Any) -> Any:
        each = nn.functional.cross_entropy(logits.mT.float(), labels.relu(), reduction="none")
        return each.mean(1).square().mean()

    model.loss_function = loss


def changed_labels(model: Any) -> None:
    """A hook changes what it is given, in place."""

    def hook(_: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        kwargs["labels"].copy_((kwargs["labels"] + 1) % VOCABULARY)

    model.register_forward_pre_hook(hook, with_kwargs=True)


def clipped_gradient(model: Any) -> None:
    """The sum of clipped gradients is not the clipped sum."""
    _inner(model).weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


def kept_features(model: Any) -> None:
    """A hook inside of a block keeps what a loss is computed from."""
    kept: dict[str, torch.Tensor] = {}
    inner = _inner(model)
    inner.register_forward_hook(lambda _, args, out: kept.update(out=out))

    def forward(self: Any, run: Callable[..., Any], given: dict[str, Any]) -> Any:
        output = run(**given)
        output.loss = output.loss + kept["out"].square().mean()
        return output

    _with_forward(model, forward)


def clipped_activations(model: Any) -> None:
    """A hook inside of a block clips the gradient by its norm over the batch."""

    def hook(_: Any, args: tuple, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: grad / (1e-3 + grad.norm()))

    _inner(model).register_forward_hook(hook)


def own_layer(model: Any) -> None:
    """A layer that normalizes over the batch in its backward."""

    class OverBatch(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return out + (out - out.detach()) * out.detach().mean()

    _inner(model).__class__ = OverBatch


def _inner(model: nn.Module) -> nn.Module:
    return next(m for name, m in model.named_modules() if ".1." in name and type(m) is nn.Linear)


def none(model: Any) -> None:
    """Nothing of a script."""


CHANGES: list[Change] = [
    weighted_tokens, counting, drawing, second_scalar, own_loss_function, changed_labels,
    clipped_gradient, kept_features, clipped_activations, own_layer, none, none, none,
]  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A model, what the script changes in it, and how an engine trains it."""

    name: str
    change: Change
    splits: str  # "adapt" or "slices"
    stage: int
    accumulation: int
    is_masked: bool

    def __str__(self) -> str:
        how = f"{self.splits}, stage {self.stage}, accumulation {self.accumulation}"
        return f"{self.name} with {self.change.__name__}, {how}, masked {self.is_masked}"

    def build(self) -> Any:
        model = build(self.name)
        self.change(model)
        return model

    def batch(self, step: int, micro: int, rank: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
        ids = torch.randint(RARE + 1, VOCABULARY, (ROWS, LENGTH), generator=generator)
        if step == STEPS - 1:
            ids[0, 2] = RARE
        found = {"input_ids": ids, "labels": ids.clone()}
        if self.is_masked:
            found["attention_mask"] = torch.ones_like(ids)
            for row in range(ROWS):
                found["attention_mask"][row, LENGTH - row % 3 :] = 0
                found["labels"][row, : row % 4] = -100
        return found


def recipe(seed: int) -> Recipe:
    draw = random.Random(seed)
    return Recipe(
        draw.choice(["llama", "llama", "t5", "mixtral"]),
        CHANGES[seed % len(CHANGES)],
        draw.choice(["adapt", "slices"]),
        draw.randrange(4),
        draw.choice([1, 2]),
        draw.random() < 0.5,
    )


def _loss(output: Any) -> torch.Tensor:
    return output["loss"] + output["second"] if "second" in output else output["loss"]


def train_plain(
    drawn: Recipe, world_size: int
) -> tuple[list[list[float]], list[torch.Tensor], list[float]]:
    """Losses by rank, the weights, and how far each has moved at most. Each rank has a replica,
    whose effects are its own.
    """
    replicas = [drawn.build() for _ in range(world_size)]
    before = [param.detach().clone() for param in replicas[0].parameters()]
    losses: list[list[float]] = [[] for _ in replicas]
    for step in range(STEPS):
        for rank, model in enumerate(replicas):
            for micro in range(drawn.accumulation):
                loss = _loss(model(**drawn.batch(step, micro, rank)))
                (loss / drawn.accumulation).backward()
                losses[rank].append(loss.item())
        with torch.no_grad():
            for params in zip(*(model.parameters() for model in replicas), strict=True):
                grads = [param.grad for param in params if param.grad is not None]
                for param in params:
                    param -= LR * sum(grads) / world_size
                    param.grad = None
    weights = [param.detach() for param in replicas[0].parameters()]
    moved = [float((new - old).abs().max()) for new, old in zip(weights, before, strict=True)]
    return losses, weights, moved


def judge(rank: int, world_size: int, seeds: list[int]) -> list[tuple[bool, str]]:
    """For each seed: whether it was refused, and what is different; empty if nothing."""
    return [_judge(recipe(seed), rank, world_size) for seed in seeds]


def _judge(drawn: Recipe, rank: int, world_size: int) -> tuple[bool, str]:
    losses, *weights = train_plain(drawn, world_size)
    expected, number = losses[rank], 0
    config = ds_config(stage=drawn.stage, accumulation=drawn.accumulation)
    if drawn.splits == "adapt":
        config["on_out_of_memory"] = "adapt"
    else:
        config["activation_checkpointing"] = {"batch_slices": 3}
    run, engine = ZeroEngine._forward, None

    def limited(self: Any, *args: Any, **given: Any) -> Any:
        output = run(self, *args, **given)
        if self.global_steps and self.slices.number == 1 and drawn.splits == "adapt":
            raise MemoryError("planted")
        return output

    try:
        model = drawn.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config)
        with mock.patch.object(ZeroEngine, "_forward", limited):
            for step in range(STEPS):
                for micro in range(drawn.accumulation):
                    loss = _loss(engine(**drawn.batch(step, micro, rank)))
                    engine.backward(loss)
                    engine.step()
                    apart = abs(loss.item() - expected[number]) / abs(expected[number])
                    if apart > 1e-5:
                        return False, f"{drawn}: loss {number} is {apart:.2g} apart"
                    number += 1
        with zero.GatheredParameters(list(model.parameters())):
            for (name, param), value, moved in zip(model.named_parameters(), *weights, strict=True):
                apart = float((param.detach() - value).abs().max())
                if apart > 1e-4 * moved + 1e-7:  # the second is the rounding of a weight
                    return False, f"{drawn}: {name} is {apart:.2g} apart, and moved by {moved:.2g}"
    except (UsageError, MemoryError) as error:
        text = str(error)
        is_named = isinstance(error, UsageError) or "nothing more can be changed" in text
        return True, "" if is_named else f"{drawn}: {text}"
    finally:
        if engine is not None:
            engine.destroy()
    return False, ""
