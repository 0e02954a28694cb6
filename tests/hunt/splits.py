"""Odd losses and odd blocks, of which a batch is split: `"on_out_of_memory": "adapt"` and
`batch_slices` give the numbers of plain torch, or refuse.

A recipe is one of transformers' models with something of a script in it, or a loss of a script's.
In the second step an engine that adapts runs out of memory, in a forward and in a backward: on the
last rank, or on all of them where it may not be able to adapt."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


# -- losses: (the engine or the model, a batch) -> the loss

Loss = Callable[[Any, dict[str, Any]], torch.Tensor]


def of_output(net: Any, batch: dict[str, Any]) -> torch.Tensor:
    output = net(**batch)
    return output["loss"] + output["second"] if "second" in output else output["loss"]


def packed(net: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Documents in one row. With a cache, which a model makes by default, they see each other."""
    ids = batch["input_ids"][:1]
    positions = torch.cat([torch.arange(3), torch.arange(LENGTH - 3)])[None]
    return net(input_ids=ids, labels=ids, position_ids=positions).loss


def of_logits(net: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The forward gets no labels."""
    logits = net(input_ids=batch["input_ids"]).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def of_preferences(net: Any, batch: dict[str, Any]) -> torch.Tensor:
    ids = batch["input_ids"]
    logits = net(input_ids=ids).logits[:, :-1].log_softmax(-1)
    sums = logits.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(1)
    return -nn.functional.logsigmoid(sums[: ROWS // 2] - sums[ROWS // 2 :]).mean()


def of_embeddings(net: Any, batch: dict[str, Any]) -> torch.Tensor:
    """An input has a gradient of its own, which a repeated backward would add again."""
    width = getattr(net, "module", net).config.hidden_size
    embedded = torch.ones(ROWS, LENGTH, width, requires_grad=True)
    return net(inputs_embeds=embedded, labels=batch["labels"]).loss


CHANGES: list[tuple[Change, Loss]] = [
    (change, of_output)
    for change in (
        *(weighted_tokens, counting, drawing, second_scalar, own_loss_function, changed_labels),
        *(clipped_gradient, kept_features, clipped_activations, own_layer, none, none, none),
    )
]
CHANGES += [(none, loss) for loss in (packed, of_logits, of_preferences, of_embeddings)]


@dataclass(frozen=True)
class Recipe:
    """A model, what the script changes in it, and how an engine trains it."""

    name: str
    change: Change
    loss: Loss
    splits: str  # "adapt" or "slices"
    stage: int
    accumulation: int
    is_masked: bool

    def __str__(self) -> str:
        how = f"{self.splits}, stage {self.stage}, accumulation {self.accumulation}"
        what = f"{self.change.__name__} and {self.loss.__name__}"
        return f"{self.name} with {what}, {how}, masked {self.is_masked}"

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
    draw, (change, loss) = random.Random(seed), CHANGES[seed % len(CHANGES)]
    return Recipe(
        draw.choice(["llama", "llama", "t5" if loss is of_output else "gpt2", "mixtral"]),
        change,
        loss,
        draw.choice(["adapt", "slices"]),
        draw.randrange(4),
        draw.choice([1, 2]),
        draw.random() < 0.5,
    )


@contextmanager
def planted(places: list[str]) -> Iterator[None]:
    """Errors of memory after the first step, in a forward or a backward, in this order."""
    run, backward, steps = ZeroEngine._forward, torch.autograd.backward, [0]

    def fail(place: str) -> None:
        if steps[-1] and places[:1] == [place]:
            places.pop(0)
            raise MemoryError("planted")

    def forward(self: Any, *args: Any, **given: Any) -> Any:
        output = run(self, *args, **given)
        steps.append(self.global_steps)
        fail("forward")
        return output

    def failing_backward(*args: Any, **given: Any) -> None:
        backward(*args, **given)
        if isinstance(args[0], list):  # the engine's: the script's ends at the forward's outputs
            fail("backward")

    with (
        mock.patch.object(ZeroEngine, "_forward", forward),
        mock.patch.object(torch.autograd, "backward", failing_backward),
    ):
        yield


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
                loss = drawn.loss(model, drawn.batch(step, micro, rank))
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
    places, engine = [], None
    if drawn.splits == "adapt":
        config["on_out_of_memory"] = "adapt"
        if rank == world_size - 1 or drawn.change is not none:  # one row cannot be cut
            places = ["backward"] if drawn.loss is packed else ["forward", "backward"]
    else:
        config["activation_checkpointing"] = {"batch_slices": 3}
    try:
        model = drawn.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config)
        with planted(places):
            for step in range(STEPS):
                for micro in range(drawn.accumulation):
                    loss = drawn.loss(engine, drawn.batch(step, micro, rank))
                    engine.backward(loss)
                    engine.step()
                    apart = abs(loss.item() - expected[number]) / abs(expected[number])
                    if apart > 1e-5:
                        return False, f"{drawn}: loss {number} is {apart:.2g} apart"
                    number += 1
        assert not places
        with zero.GatheredParameters(list(model.parameters())):
            for (name, param), value, moved in zip(model.named_parameters(), *weights, strict=True):
                apart = float((param.detach() - value).abs().max())
                if apart > 1e-4 * moved + 1e-7:  # the second is the rounding of a weight
                    return False, f"{drawn}: {name} is {apart:.2g} apart, and moved by {moved:.2g}"
    except (UsageError, MemoryError, torch.OutOfMemoryError) as error:
        text = str(error)
        said = "nothing more can be changed", "an input requires a gradient"
        is_named = isinstance(error, UsageError) or any(each in text for each in said)
        return True, "" if is_named else f"{drawn}: {text}"
    finally:
        if engine is not None:
            engine.destroy()
    return False, ""
