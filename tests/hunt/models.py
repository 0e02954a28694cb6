"""A seed makes a model of odd parts, and an odd way of training it."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

import zero
from tests.hunt import gradients, structure, values  # noqa: F401 (they fill PARTS)
from tests.hunt.parts import ILLEGAL, PARTS, WIDTH
from tests.hunt.wrappers import WRAPPERS

ROWS, STEPS = 4, 3


class Model(nn.Module):
    def __init__(self, parts: list[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(WIDTH, WIDTH)

    def before_step(self, step: int) -> None:
        for module in self.modules():
            if module is not self and hasattr(module, "before_step"):
                module.before_step(step)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part(x + 0)) + 0.5 * x
        return self.head(x)


# -- ways of training: (net, model, x, y) -> the losses whose backward runs, one after the other.
# `net` is the engine or the model itself.

Style = Callable[[nn.Module, nn.Module, torch.Tensor, torch.Tensor], Iterator[torch.Tensor]]


def mse(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(found, wanted)


def plain(net, model, x, y):
    yield mse(net(x), y)


def two_forwards(net, model, x, y):
    yield mse(net(x), y) + mse(net(x.flip(1)), y)


def two_backwards(net, model, x, y):
    """Two forwards before their backwards, which come in the same order."""
    first, second = mse(net(x), y), mse(net(x.flip(1)), y)
    yield first
    yield second


def retained(net, model, x, y):
    """The same loss twice."""
    loss = mse(net(x), y)
    yield loss
    yield loss


def penalty(net, model, x, y):
    """Weight decay by hand, after the forward."""
    loss = mse(net(x), y)
    params = [param for param in model.parameters() if param.is_floating_point()]
    yield loss + 0.01 * sum(param.float().square().sum() for param in params)


def gathered_penalty(net, model, x, y):
    """The graph of a penalty is made inside of a context that ends before the backward."""
    params = [param for param in model.parameters() if param.is_floating_point()]
    with zero.GatheredParameters(params[::2]):
        before = 0.01 * sum(param.float().square().sum() for param in params[::2])
    loss = mse(net(x), y) + before
    with zero.GatheredParameters(params):
        for param in params:
            given = param.float()
            loss = loss + 0.01 * (given.reshape(-1)[1:].pow(3).sum() + given.clamp(-0.1, 0.1).sum())
            loss = loss + 0.01 * (given.abs().sum() + (given * given.detach()).sum())
    with zero.GatheredParameters(model.head.weight):
        loss = loss + 0.01 * (model.head.weight @ model.head.weight.t()).norm()
    yield loss


def gathered_write(net, model, x, y):
    """All ranks get what one writes after a forward, which may have left the weight gathered."""
    with torch.no_grad():
        before = mse(net(x), y)
        with zero.GatheredParameters(model.head.weight, modifier_rank=0):
            model.head.weight.mul_(0.95)
        between = mse(net(x), y)
    loss = mse(net(x), y)
    # Not all weights: what a part writes to one that is gathered only for reading is lost.
    with zero.GatheredParameters(model.head.parameters()):
        yield loss + before + between


def head_read_after(net, model, x, y):
    yield mse(net(x) @ model.head.weight, y)


def reads_after_two(net, model, x, y):
    """Two forwards, each with a read after it, before one backward."""
    first = mse(net(x) @ model.head.weight, y)
    yield first + mse(net(x.flip(1)) @ model.head.weight.t(), y)


def by_functional_call(net, model, x, y):
    yield mse(functional_call(model, dict(model.named_parameters()), (x,)), y)


def evaluated_between(net, model, x, y):
    with torch.no_grad():
        net.eval()
        before = mse(net(x), y)
        net.train()
    yield mse(net(x), y) + before


def discarded(net, model, x, y):
    """A forward with gradients whose result nobody uses."""
    net(x.flip(0))
    yield mse(net(x), y)


def part_alone(net, model, x, y):
    """The root is not called at all."""
    yield mse(model.head(torch.tanh(model.parts[0](x + 0))), y)


def part_and_whole(net, model, x, y):
    yield mse(net(model.parts[-1](x + 0)), y)


def other_order(net, model, x, y):
    """Two forwards, and their backwards in the other order."""
    first, second = mse(net(x), y), mse(net(x.flip(1)), y)
    yield second
    yield first


def gradients_first(net, model, x, y):
    """The norm of the gradients, before the backward that counts."""
    loss = mse(net(x), y)
    params = [param for param in model.parameters() if param.requires_grad]
    grads = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    yield loss + sum(float(grad.float().norm()) for grad in grads if grad is not None)


def input_gradient(net, model, x, y):
    x.requires_grad_()
    yield mse(net(x), y)
    yield x.grad.norm()  # has no graph


def split(net, model, x, y):
    """Two graphs, between which the script carries the gradient; it runs both backwards itself."""
    hidden = net(x)
    given = hidden.detach().requires_grad_()
    yield mse(model.head(torch.tanh(given)), y)
    hidden.backward(given.grad)


def written_before_step(net, model, x, y):
    """The script scales a weight between backward and step."""
    yield mse(net(x), y)
    with torch.no_grad():
        model.head.weight.mul_(0.95)


def written_before_forward(net, model, x, y):
    with torch.no_grad():
        model.head.weight.mul_(0.95)
    yield mse(net(x), y)


def frozen_for_backward(net, model, x, y):
    """Between forward and backward: the gradient there still counts."""
    model.head.requires_grad_(True)
    loss = mse(net(x), y)
    model.head.requires_grad_(False)
    yield loss


def frozen_for_step(net, model, x, y):
    """Between micro-batches, and for the step, as a script that alternates between two models
    does.
    """
    model.head.requires_grad_(True)
    yield mse(net(x), y)
    model.head.requires_grad_(False)


def thawed_for_step(net, model, x, y):
    """From the second micro-batch on there is no gradient, only momentum."""
    model.head.requires_grad_(not hasattr(model, "has_begun"))
    yield mse(net(x), y)
    model.head.requires_grad_(True)
    model.has_begun = True


# -- derivatives that a script takes itself, beside the backward of its loss


def of_input(net, model, x, y):
    """A saliency map before the backward, from the same graph."""
    x.requires_grad_()
    out = net(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    yield mse(out * gradient.norm(), y)


def of_another_forward(net, model, x, y):
    """Adversarial inputs: the graph of the first forward is used for its derivative only."""
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(mse(net(x), y), x)
    yield mse(net((x + 0.1 * gradient.sign()).detach()), y)


def by_backward_to_input(net, model, x, y):
    x.requires_grad_()
    mse(net(x), y).backward(inputs=[x])
    yield mse(net((x + 0.1 * x.grad.sign()).detach()), y)


def gradient_penalty(net, model, x, y):
    """The derivative is differentiated once more."""
    x.requires_grad_()
    out = net(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    yield mse(out, y) + gradient.square().sum()


def penalty_alone(net, model, x, y):
    """A backward of the loss and one of a penalty with a forward of its own, as for a critic."""
    yield mse(net(x), y)
    mixed = (x * 0.5).requires_grad_()
    (gradient,) = torch.autograd.grad(net(mixed).sum(), mixed, create_graph=True)
    yield (gradient.norm(dim=1) - 1).square().mean()


def sharpness(net, model, x, y):
    """The norm of the gradient of all weights as a part of the loss."""
    loss = mse(net(x), y)
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    yield loss + sum(gradient.square().sum() for gradient in found)


def mapped(net, model, x, y):
    yield mse(torch.func.vmap(net)(x), y)


def of_each_output(net, model, x, y):
    """A Jacobian, whose rows are computed by vmap."""
    rows = torch.autograd.functional.jacobian(
        lambda given: net(given).sum(0), x, create_graph=True, vectorize=True
    )
    yield rows.square().sum() + mse(net(x), y)


def forward_mode(net, model, x, y):
    with forward_ad.dual_level():
        out, change = forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x))))
        yield mse(out, y) + change.square().mean()


STYLES: dict[str, Style] = {
    style.__name__: style
    for style in (
        *(plain, two_forwards, two_backwards, retained, penalty, head_read_after),
        *(reads_after_two, by_functional_call, gathered_penalty, gathered_write),
        *(evaluated_between, discarded, part_alone, part_and_whole, other_order),
        *(gradients_first, input_gradient, split, written_before_step, written_before_forward),
        *(frozen_for_backward, frozen_for_step, thawed_for_step),
    )
}
# Not every part has all of these derivatives, so these ways are tried with a layer alone.
DERIVATIVES: dict[str, Style] = {
    style.__name__: style
    for style in (
        *(of_input, of_another_forward, by_backward_to_input, gradient_penalty, penalty_alone),
        *(sharpness, mapped, of_each_output, forward_mode),
    )
}
WAYS = STYLES | DERIVATIVES


# A large eps, so that rounding in a gradient near zero is not an update of full size.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, eps=1e-2, weight_decay=0.1),
    "AMSGrad": partial(torch.optim.AdamW, lr=0.01, eps=1e-2, amsgrad=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.01, eps=1e-2, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, eps=1e-2, momentum=0.5),
    "ASGD": partial(torch.optim.ASGD, lr=0.01),
}


def run(style: str, backward: Callable[..., None], *given: Any) -> float:
    """Run the backwards of a way of training; the sum of its losses."""
    total, former = 0.0, None
    for loss in WAYS[style](*given):
        if loss.requires_grad:
            backward(loss, retain_graph=style == "retained" and loss is not former)
        total, former = total + loss.item(), loss
    return total


@dataclass(frozen=True)
class Recipe:
    """What a seed has drawn.

    Attributes: parts: names, each with its wrappers, outermost first. repeats: the first part is
    also the last one. by_script: the script calls `loss.backward()`, not `engine.backward`.
    tolerance: of losses and weights."""

    seed: int
    parts: tuple[tuple[str, ...], ...]
    repeats: bool
    style: str
    optimizer: str
    by_script: bool
    two_rates: bool

    def __str__(self) -> str:
        parts = ", ".join("(".join(names) + ")" * (len(names) - 1) for names in self.parts)
        flags = ", repeated" * self.repeats + ", by script" * self.by_script
        return f"{parts}; {self.style}, {self.optimizer}{flags}"

    def build(self) -> Model:
        """The model, the same for each call."""
        torch.manual_seed(self.seed)
        parts = [_build(names) for names in self.parts]
        return Model([*parts, parts[0]] if self.repeats else parts)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        params: list = [param for param in model.parameters() if param.requires_grad]
        if self.two_rates:
            params = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}]
        wanted = {getattr(kind, "optimizer", self.optimizer) for kind in self._kinds()}
        return OPTIMIZERS["SGD" if "SGD" in wanted else self.optimizer](params)

    @property
    def tolerance(self) -> float:
        return max(getattr(kind, "tolerance", 1e-5) for kind in self._kinds())

    @property
    def may_be_refused(self) -> bool:
        """Whether the engine may refuse the model by name; any other must train."""
        is_illegal = any(names[-1] in ILLEGAL for names in self.parts)
        return is_illegal or self.style.startswith("written")

    def _kinds(self) -> list[Any]:
        return [PARTS[names[-1]] for names in self.parts]


def _build(names: tuple[str, ...]) -> nn.Module:
    *wrappers, name = names
    made = PARTS[name]()
    kinds = {kind.__name__: kind for kind in WRAPPERS}
    for wrapper in reversed(wrappers):
        made = kinds[wrapper](made)
    return made


def alone() -> list[Recipe]:
    """Each part, each wrapper around a layer and each way of training it, with nothing else; and
    what is without gradients in some steps or on some ranks, with each optimizer."""
    kinds = [((name,), "plain", "SGD") for name in sorted(PARTS)]
    kinds += [((kind.__name__, "CalledTwice"), "plain", "SGD") for kind in WRAPPERS]
    kinds += [(("CalledTwice",), style, "SGD") for style in WAYS]
    pausing = "EveryOtherStep", "NewBranchLater", "PausedParts", "Experts"
    kinds += [((name,), "plain", each) for name in pausing for each in list(OPTIMIZERS)[1:]]
    return [
        Recipe(seed, (names,), False, style, optimizer, style == "split", False)
        for seed, (names, style, optimizer) in enumerate(kinds, start=-len(kinds))
    ]


def recipe(seed: int) -> Recipe:
    """Draw a recipe that plain torch can train; a negative seed is that of one of `alone`.

    Parts do not always fit together: an in-place part may change what the one before it needs."""
    if seed < 0:
        return alone()[seed]
    for attempt in range(100):
        drawn = _draw(seed, random.Random(1000 * seed + attempt))
        with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
            train_plain(drawn, world_size=1, accumulation=1)
            return drawn
    raise AssertionError(f"no recipe of seed {seed} trains in plain torch")


def _draw(seed: int, draw: random.Random) -> Recipe:
    # Consecutive seeds go through all parts, so that none is left out.
    names = sorted(PARTS)
    first = names[seed % len(names)]
    style = draw.choice(("plain", *STYLES))
    legal = [name for name in names if name not in ILLEGAL]
    chosen = [first, *draw.sample(legal, draw.choice((0, 1, 1, 2)))]
    draw.shuffle(chosen)
    wrapped = []
    for name in chosen:
        count = draw.choice((0, 0, 1, 1, 2))
        wrapped.append((*(kind.__name__ for kind in draw.sample(WRAPPERS, count)), name))
    return Recipe(
        seed,
        tuple(wrapped),
        repeats=draw.random() < 0.15,
        style=style,
        optimizer=draw.choice(("SGD", "AdamW", *OPTIMIZERS)),
        # Gradients of the script's own backward are divided by the accumulation when they are
        # collected, so that those of inputs are not.
        by_script=style == "split" or (draw.random() < 0.2 and style != "input_gradient"),
        two_rates=draw.random() < 0.2,
    )


# -- in plain torch


@dataclass
class Trained:
    """The losses of each rank, by step and micro-batch, and its weights and buffers at the end."""

    losses: list[list[float]]
    tensors: list[dict[str, torch.Tensor]]


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets. From here on, random numbers are those of this batch."""
    torch.manual_seed(1000 + 100 * step + 10 * micro + rank)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def train_plain(recipe: Recipe, world_size: int, accumulation: int) -> Trained:
    """Train in this process what the engine trains on `world_size` ranks.

    Each rank has a replica of its own, as its buffers are its own. Replicas get the mean gradient,
    and none where no replica has one.
    """
    replicas = [recipe.build() for _ in range(world_size)]
    optimizers = [recipe.make_optimizer(model) for model in replicas]
    losses: list[list[float]] = [[] for _ in replicas]

    def backward(loss: torch.Tensor, retain_graph: bool = False) -> None:
        (loss / accumulation).backward(retain_graph=retain_graph)

    for step in range(STEPS):
        for rank, model in enumerate(replicas):
            model.before_step(step)
            for micro in range(accumulation):
                x, y = batch(step, micro, rank)
                losses[rank].append(run(recipe.style, backward, model, model, x, y))
        for params in zip(*(model.parameters() for model in replicas), strict=True):
            given = [param.grad for param in params if param.grad is not None]
            given = [grad.to_dense() if grad.is_sparse else grad for grad in given]
            for param in params if given else ():
                param.grad = sum(given).to(param.dtype) / world_size
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses, [tensors_of(model) for model in replicas])


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}
