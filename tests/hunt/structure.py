"""Parts whose modules are odd: shared, frozen, chosen, normed, recurrent or checkpointed."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from tests.hunt.parts import PARTS, WIDTH, Made, linear, matrix, part

# -- sharing


@part
class CalledTwice(Made):
    has = {"linear": linear}

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))


@part
class NeverCalled(CalledTwice):
    has = {"unused": linear}


@part
class WritesToViews(CalledTwice):
    """What a linear layer returns for three dimensions is a view, and is written to."""

    def forward(self, x):
        hidden = self.linear(x[None])
        hidden *= 2
        return self.linear(torch.tanh(hidden))[0].mul_(0.5)


@part
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@part
class TiedWithRead(Tied):
    def forward(self, x):
        return super().forward(x) + x @ self.first.weight


@part
class SharedModule(nn.Module):
    """One module under two names, in a container and alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.layers = nn.ModuleList([self.first, nn.Tanh(), self.first])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


# -- frozen and thawed


@part
class FrozenLater(CalledTwice):
    first_step, last_step = 1, 9

    def before_step(self, step: int) -> None:
        self.linear.requires_grad_(not self.first_step <= step < self.last_step)


@part
class FrozenForOneStep(FrozenLater):
    last_step = 2


@part
class PausedParts(Made):
    """In each step one weight is frozen, and the next one is not used for some rows."""

    step = 0

    has = {
        "layers": lambda: nn.ModuleList([linear() for _ in range(3)]),
        "scale": lambda: nn.Parameter(torch.ones(WIDTH)),
    }

    def before_step(self, step: int) -> None:
        self.step = step
        for number, layer in enumerate(self.layers):
            layer.weight.requires_grad_((number - step) % 3 != 0)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if (number - self.step) % 3 != 1 or x.sum() > 0:
                x = torch.tanh(layer(x)) + x
        return x * self.scale if self.step else x


# -- branches


@part
class EveryOtherStep(Made):
    step = 0

    has = {"branches": lambda: nn.ModuleList([linear(), nn.Sequential(linear(), linear())])}

    def before_step(self, step: int) -> None:
        self.step = step

    def forward(self, x):
        return self.branches[self.step % 2](x)


@part
class NewBranchLater(EveryOtherStep):
    def forward(self, x):
        return self.branches[0](x) if self.step == 0 else self.branches[1](self.branches[0](x))


@part
class Experts(Made):
    """Rows choose, so that ranks may run different modules."""

    needs_leaf = True

    has = {"experts": lambda: nn.ModuleList([linear() for _ in range(3)])}

    def forward(self, x):
        chosen = (x.sum(1).abs() * 3).long() % 3
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (rows := chosen == number).any():
                out[rows] = expert(x[rows])
        return out


# -- results anywhere


class Direct(Made):
    """Two matrices in a row: the gradient of the first one needs the second one's values."""

    has = {"first": matrix, "second": matrix}

    def forward(self, x):
        return torch.tanh(x @ self.first) @ self.second


@dataclass(slots=True)
class Slotted:
    value: torch.Tensor
    other: object = None


class Packed(nn.Module):
    """What a module with weights of its own returns: a backward hook on it unshards the weights,
    so it has to be found in whatever this is.
    """

    class Inner(Direct):
        def __init__(self, pack: Callable) -> None:
            super().__init__()
            self.pack = pack

        def forward(self, x):
            return self.pack(super().forward(x))

    def __init__(self, pack: Callable, unpack: Callable) -> None:
        super().__init__()
        self.inner, self.unpack = self.Inner(pack), unpack

    def forward(self, x):
        return self.unpack(self.inner(x))


def in_circle(value: torch.Tensor) -> Slotted:
    child = Slotted(value)
    child.other = Slotted(value, child)
    return child


PACKINGS: dict[str, tuple[Callable, Callable]] = {
    "Object": (lambda value: SimpleNamespace(value=value), attrgetter("value")),
    "Nest": (lambda value: {"a": [SimpleNamespace(b=value)]}, lambda nest: nest["a"][0].b),
    "Slotted": (Slotted, attrgetter("value")),
    "Mapping": (lambda value: UserDict(value=value), lambda found: found["value"]),
    "Set": (lambda value: {value}, lambda found: next(iter(found))),
    "Circle": (in_circle, attrgetter("other.other.value")),
    "WithSparse": (lambda value: (torch.eye(2).to_sparse(), value), lambda found: found[1]),
}
for name, packing in PACKINGS.items():
    PARTS[f"Returns{name}"] = partial(Packed, *packing)


@part
class KeepsResult(Made):
    class Inner(Direct):
        def forward(self, x):
            self.kept = super().forward(x)

    has = {"inner": Inner}

    def forward(self, x):
        self.inner(x)
        return self.inner.kept


# -- in place


@part
class InPlaceOnOutput(CalledTwice):
    def forward(self, x):
        y = self.linear(x)
        y.mul_(2).add_(1)
        y[:, :2] = 0
        return self.linear(y)


@part
class InPlaceOnInput(CalledTwice):
    def forward(self, x):
        x.add_(1)
        return self.linear(x)


@part
class OutputIntoArgument(Made):
    class Inner(Direct):
        def forward(self, x, out):
            out.copy_(super().forward(x))

    has = {"inner": Inner}

    def forward(self, x):
        out = torch.zeros_like(x)
        self.inner(x, out)
        return out


# -- functional calls and parametrizations


@part
class FunctionalScaled(CalledTwice):
    def forward(self, x):
        params = {name: 0.5 * param for name, param in self.linear.named_parameters()}
        return functional_call(self.linear, params, (x,)) + self.linear(x)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


@part
class CachedParametrization(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.linear, "weight", Symmetric())

    def forward(self, x):
        with parametrize.cached():
            return super().forward(x) + x @ self.linear.weight


def old_weight_norm(layer: nn.Linear) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return nn.utils.weight_norm(layer)


def half_frozen(layer: nn.Linear) -> nn.Module:
    layer.weight.requires_grad_(False)
    return layer


class Changed(CalledTwice):
    def __init__(self, change: Callable) -> None:
        super().__init__()
        self.linear = change(self.linear)


CHANGES: dict[str, Callable] = {
    "Frozen": lambda layer: layer.requires_grad_(False),
    "HalfFrozen": half_frozen,
    "WeightNorm": parametrizations.weight_norm,
    "OldWeightNorm": old_weight_norm,
    "SpectralNorm": parametrizations.spectral_norm,
    "OldSpectralNorm": nn.utils.spectral_norm,
    "Orthogonal": partial(parametrizations.orthogonal, orthogonal_map="cayley"),
    "Pruned": partial(prune.l1_unstructured, name="weight", amount=0.3),
}
for name, change in CHANGES.items():
    PARTS[name] = partial(Changed, change)


# -- buffers and norms


@part
class BatchNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(linear(), nn.BatchNorm1d(WIDTH))


@part
class MovingMean(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


# -- recurrent layers and attention


@part
class Lstm(Made):
    has = {"lstm": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2)}

    def forward(self, x):
        return self.lstm(x[None])[0][0]


@part
class TransformerLayer(Made):
    has = {"layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1)}

    def forward(self, x):
        return self.layer(x)


# -- checkpoints


@part
class CheckpointedRead(Tied):
    def _run(self, x):
        return torch.tanh(x @ self.first.weight) @ self.second.weight + self.second.bias

    def forward(self, x):
        return checkpoint(self._run, x, use_reentrant=False)


@part
class ReentrantRead(CheckpointedRead):
    def forward(self, x):
        return checkpoint(self._run, x, use_reentrant=True)


@part
class NestedCheckpoints(Tied):
    def _inner(self, x):
        return checkpoint(self.first, x, use_reentrant=False)

    def forward(self, x):
        return self.second(checkpoint(self._inner, x, use_reentrant=False))


@part
class CheckpointedDropout(CalledTwice):
    def _run(self, x):
        return nn.functional.dropout(self.linear(x), 0.3)

    def forward(self, x):
        return checkpoint(self._run, x, use_reentrant=True) + checkpoint(
            self._run, x, use_reentrant=False
        )
