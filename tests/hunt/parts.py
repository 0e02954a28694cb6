"""Odd parts of models: each maps (rows, WIDTH) to (rows, WIDTH), and does one odd thing on the way.

A part must train in plain torch. Whether its parameters are legal for the engine does not matter:
the engine may refuse it, if the error names a parameter or module."""

from __future__ import annotations

import contextlib
import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

WIDTH = 6

PARTS: dict[str, type[nn.Module]] = {}
# Those that the engine refuses, whatever is around them.
ILLEGAL: set[str] = set()


def part(kind: type[nn.Module]) -> type[nn.Module]:
    PARTS[kind.__name__] = kind
    return kind


def illegal(kind: type[nn.Module]) -> type[nn.Module]:
    ILLEGAL.add(kind.__name__)
    return part(kind)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def matrix() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)


# -- sharing


@part
class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))


@part
class NeverCalled(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        self.unused = linear()


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


@illegal
class AliasedData(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight = nn.Parameter(self.first.weight.data)


@illegal
class TransposedAlias(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight = nn.Parameter(self.first.weight.data.t())


@illegal
class BufferIsView(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", self.linear.weight.data[0])

    def forward(self, x):
        return super().forward(x) * self.row


@illegal
class CachedView(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        self.cached = self.linear.weight.detach().t()

    def forward(self, x):
        return super().forward(x) @ self.cached


@part
class FrozenAliases(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.requires_grad_(False)
        self.second.weight = nn.Parameter(self.first.weight.data, requires_grad=False)


# -- frozen and thawed


@part
class Frozen(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)


@part
class HalfFrozen(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.requires_grad_(False)


@part
class FrozenLater(CalledTwice):
    first_step, last_step = 1, 9

    def before_step(self, step: int) -> None:
        self.linear.requires_grad_(not self.first_step <= step < self.last_step)


@part
class FrozenForOneStep(FrozenLater):
    """Meanwhile Adam's count of steps goes on (docs/optimizers.md), unlike plain torch's."""

    last_step = 2
    optimizer = "SGD"


# -- branches


@part
class EveryOtherStep(nn.Module):
    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([linear(), nn.Sequential(linear(), linear())])

    def before_step(self, step: int) -> None:
        self.step = step

    def forward(self, x):
        return self.branches[self.step % 2](x)


@part
class NewBranchLater(EveryOtherStep):
    def forward(self, x):
        return self.branches[0](x) if self.step == 0 else self.branches[1](self.branches[0](x))


@part
class Experts(nn.Module):
    """Rows choose, so that ranks may run different modules."""

    needs_leaf = True

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([linear() for _ in range(3)])

    def forward(self, x):
        chosen = (x.sum(1).abs() * 3).long() % 3
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (rows := chosen == number).any():
                out[rows] = expert(x[rows])
        return out


# -- in place


@part
class InPlaceOnOutput(CalledTwice):
    def forward(self, x):
        y = self.linear(x)
        y.mul_(2).add_(1)
        y[:, :2] = 0
        return self.linear(y)


@part
class InPlaceOnView(CalledTwice):
    def forward(self, x):
        y = self.linear(x)
        y[:, :3].mul_(2)
        return y.relu_()


@part
class InPlaceOnInput(CalledTwice):
    def forward(self, x):
        x.add_(1)
        return self.linear(x)


@part
class OutputIntoArgument(nn.Module):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = matrix(), matrix()

        def forward(self, x, out):
            out.copy_(torch.tanh(x @ self.first) @ self.second)

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        out = torch.zeros_like(x)
        self.inner(x, out)
        return out


# -- functional calls and parametrizations


@part
class Functional(CalledTwice):
    def forward(self, x):
        return functional_call(self.linear, dict(self.linear.named_parameters()), (x,))


@part
class FunctionalScaled(CalledTwice):
    def forward(self, x):
        params = {name: 0.5 * param for name, param in self.linear.named_parameters()}
        return functional_call(self.linear, params, (x,)) + self.linear(x)


@part
class WeightNorm(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(linear())


@part
class OldWeightNorm(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.linear = nn.utils.weight_norm(linear())


@part
class SpectralNorm(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(linear())


@part
class OldSpectralNorm(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(linear())


@part
class Orthogonal(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.orthogonal(linear(), orthogonal_map="cayley")


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


@part
class Pruned(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.linear, "weight", 0.3)


# -- buffers and norms


@part
class BatchNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(linear(), nn.BatchNorm1d(WIDTH))


@part
class GroupNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(linear(), nn.GroupNorm(2, WIDTH), nn.LayerNorm(WIDTH, bias=False))


@part
class CountingBuffer(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.linear(x) / self.calls


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
class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, x):
        return self.lstm(x[None])[0][0]


@part
class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x):
        state = torch.zeros_like(x)
        for _ in range(3):
            state = self.cell(x, state)
        return state


@part
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@part
class TransformerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1)

    def forward(self, x):
        return self.layer(x)


@part
class KeepsItsState(CalledTwice):
    """Truncated backpropagation through time: the next forward begins where this one ended."""

    state: torch.Tensor | None = None

    def forward(self, x):
        state = torch.zeros_like(x) if self.state is None else self.state.detach()
        self.state = torch.tanh(self.linear(x + state))
        return self.state


# -- checkpoints


@part
class Reentrant(CalledTwice):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


@part
class NonReentrant(CalledTwice):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


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


# -- reads


@part
class ReadsAnother(nn.Module):
    """Reads a weight of a module that it calls only later."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.linear = linear(), linear()

    def forward(self, x):
        return self.other(torch.tanh(self.linear(x) @ self.other.weight))


@part
class HiddenReference(nn.Module):
    """The owner of the weight is in a list, where torch does not register it."""

    class Reader(nn.Module):
        def __init__(self, other: nn.Linear):
            super().__init__()
            self.others = [other]
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.scale * x @ self.others[0].weight.t()

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.reader = self.Reader(self.linear)

    def forward(self, x):
        return self.reader(torch.tanh(self.linear(x))) + self.reader(x)


@part
class ReadsData(ReadsAnother):
    """Values that no gradient goes to."""

    def forward(self, x):
        scale = self.other.weight.data.abs().mean() + self.other.bias.detach().norm()
        return self.other(self.linear(x)) * scale


@part
class ReadsInManyWays(ReadsAnother):
    def forward(self, x):
        weight, bias = self.other.weight, self.other.bias
        rows = torch.stack([row.sum() for row in weight])
        flat = nn.utils.parameters_to_vector([weight, bias])
        number = float(bias[0].detach()) + bias.max().item() + sum(bias.tolist())
        copied = torch.tensor(bias.detach().numpy()) + torch.as_tensor(bias.detach())
        norm = torch.stack(torch._foreach_norm([weight, bias])).sum()
        product = torch.ops.aten.mm.default(x, weight)
        return product * rows * norm + flat.mean() + number + copied + self.linear(x)


@part
class ReadsByNumpy(ReadsAnother):
    def forward(self, x):
        with torch.no_grad():
            bound = float(self.other.weight.detach().numpy().max())
        return self.other(self.linear(x)).clamp(-bound, bound)


@part
class ReturnsItsWeight(nn.Module):
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.other = matrix(), matrix()

        def forward(self, x):
            return {"out": x @ self.other, "weight": self.weight, "view": self.weight.t()}

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        found = self.inner(x)
        return torch.tanh(found["out"] @ found["weight"]) @ found["view"]


@part
class ReadsAllWeights(ReadsAnother):
    """Each forward looks at the norm of all parameters of the part."""

    def forward(self, x):
        with torch.no_grad():
            total = sum(param.square().sum() for param in self.parameters())
        return self.other(self.linear(x)) / (1 + total)


@part
class DetachedTwin(CalledTwice):
    """The same module without gradients first, as for a target of its own."""

    def forward(self, x):
        with torch.no_grad():
            target = self.linear(x)
        return self.linear(x) - 0.5 * target


@part
class KeepsView(CalledTwice):
    """Looks at the weight of the last forward, which plain torch shows as it is now."""

    seen: torch.Tensor | None = None

    def forward(self, x):
        scale = 1.0 if self.seen is None else 1 + self.seen.abs().mean()
        self.seen = self.linear.weight.detach()
        return super().forward(x) * scale


@part
class KeepsCopy(CalledTwice):
    seen: torch.Tensor | None = None

    def forward(self, x):
        scale = 1.0 if self.seen is None else 1 + self.seen.abs().mean()
        self.seen = self.linear.weight.detach().clone()
        return super().forward(x) * scale


@part
class ReadsStateDict(ReadsAnother):
    def forward(self, x):
        state = {name: value.clone() for name, value in self.other.state_dict().items()}
        return self.other(self.linear(x)) * state["weight"].abs().mean()


@part
class LazyTarget(CalledTwice):
    """Makes a copy of a module in the first forward."""

    target: list[nn.Module] | None = None

    def forward(self, x):
        if self.target is None:
            self.target = [copy.deepcopy(self.linear)]
        with torch.no_grad():
            wanted = self.target[0](x)
        return self.linear(x) - wanted


@part
class InThread(CalledTwice):
    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().forward, x).result()


@part
class TriesAndFails(ReadsAnother):
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.linear = matrix(), linear()

        def forward(self, x, fails):
            y = self.linear(x @ self.weight)
            if fails:
                raise ArithmeticError
            return y

    def __init__(self) -> None:
        super().__init__()
        self.failing = self.Failing()

    def forward(self, x):
        with contextlib.suppress(ArithmeticError):
            self.failing(x, fails=True)
        return self.failing(super().forward(x), fails=False)


# -- writes


@part
class Clamped(CalledTwice):
    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.clamp_(-0.3, 0.3)
        return super().forward(x)


@part
class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, max_norm=1.0)

    def forward(self, x):
        return self.table(torch.arange(len(x)) % 3) * x


@illegal
class WritesData(CalledTwice):
    def forward(self, x):
        self.linear.weight.data.clamp_(-0.3, 0.3)
        return super().forward(x)


@part
class AssignsData(CalledTwice):
    def forward(self, x):
        self.linear.weight.data = self.linear.weight.data * 0.9
        return super().forward(x)


@part
class WritesAnother(ReadsAnother):
    """Writes to a weight of another module, before and after that module's call."""

    def forward(self, x):
        with torch.no_grad():
            self.other.weight.mul_(0.9)
        return self.other(self.linear(x))


@part
class WritesInBackward(CalledTwice):
    """A gradient hook clamps the weight, once the gradient is there."""

    def forward(self, x):
        hook = torch.compiler.disable(self._clamp)
        x = x + 0 if x.requires_grad else x.clone().requires_grad_()
        x.register_hook(hook)
        return self.linear(x)

    def _clamp(self, grad):
        with torch.no_grad():
            self.linear.weight.clamp_(-0.3, 0.3)


@part
class Follower(nn.Module):
    """A frozen module that follows a trained one, as in self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = linear(), linear()
        self.target.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
            for target, online in pairs:
                target.lerp_(online, 0.1)
        return self.online(x) - self.target(x)


# -- containers, odd parameters and dtypes


@part
class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([matrix(), nn.Parameter(torch.randn(WIDTH))])
        self.named = nn.ParameterDict({"a": matrix(), "b": nn.Parameter(torch.randn(1))})

    def forward(self, x):
        hidden = torch.tanh(x @ self.items[0] + self.items[1])
        return hidden @ self.named["a"] * self.named["b"]


@part
class OddShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.strided = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.long = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def forward(self, x):
        weight = torch.cat([self.strided, self.empty])
        return self.scalar * x @ weight[self.long]


@part
class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(1, 2, 3, padding=1)
        self.conv = conv.to(memory_format=torch.channels_last)
        self.out = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x):
        found = self.conv(x[None, None])[0]
        return self.out(found[0], found[1])


@part
class Bags(nn.Module):
    optimizer = "SGD"  # AdamW takes no sparse gradients
    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(5, WIDTH, mode="sum", sparse=self.sparse)

    def forward(self, x):
        return x + self.table(torch.arange(2 * len(x)).view(-1, 2) % 5)


@part
class SparseGradients(Bags):
    sparse = True


@illegal
class ComplexWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


@illegal
class DoubleWeights(CalledTwice):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear().double()

    def forward(self, x):
        return super().forward(x.double()).float()


@part
class HalfPrecision(CalledTwice):
    """A part in bf16 between parts in fp32."""

    tolerance = 2e-2

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear().bfloat16()

    def forward(self, x):
        return super().forward(x.bfloat16()).float()


@part
class Autocast(CalledTwice):
    tolerance = 2e-2

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


# -- autograd


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class _Unsaved(_Product):
    """Keeps the parameter itself on the context."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight.t(), ctx.x.t() @ grad


@part
class OwnFunction(ReadsAnother):
    def forward(self, x):
        return _Product.apply(torch.tanh(self.linear(x)), self.other.weight) + self.other.bias


@part
class FunctionKeepsWeight(ReadsAnother):
    def forward(self, x):
        return _Unsaved.apply(torch.tanh(self.linear(x)), self.other.weight) + self.other.bias


@part
class GradientHooks(Tied):
    """Hooks of the user's on parameters, results and modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first.bias.register_hook(lambda grad: 0.5 * grad)
        self.second.register_full_backward_hook(lambda module, given, wanted: (given[0] * 2,))
        self.second.register_forward_hook(lambda module, args, output: output + 1)
        self.second.register_forward_pre_hook(lambda module, args: (args[0] * 3,))

    def forward(self, x):
        y = super().forward(x)
        y.register_hook(lambda grad: 0.9 * grad)
        return y


@part
class StraightThrough(CalledTwice):
    def forward(self, x):
        y = self.linear(x)
        return y + (y.round() - y).detach()


@part
class GradientInForward(CalledTwice):
    """A first derivative inside of forward, of which no second one is taken."""

    def forward(self, x):
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(super().forward(given).square().sum(), given)
        return self.linear(x) + 0.1 * grad


@part
class BackwardInForward(CalledTwice):
    def forward(self, x):
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            torch.autograd.backward(super().forward(given).square().sum(), inputs=[given])
        return self.linear(x) + 0.1 * given.grad


@part
class GradientPenalty(CalledTwice):
    def forward(self, x):
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            out = super().forward(given).square().sum()
            (grad,) = torch.autograd.grad(out, given, create_graph=True)
        return self.linear(x) + 0.1 * grad


@part
class Mapped(CalledTwice):
    def forward(self, x):
        return torch.func.vmap(super().forward)(x)


@part
class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.trace(linear(), torch.zeros(2, WIDTH))

    def forward(self, x):
        return self.inner(x)


# -- around other parts: (part) -> part


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner


class Result:
    def __init__(self, value: torch.Tensor):
        self.value = value


class GivesObject(Wrapper):
    class Inner(Wrapper):
        def forward(self, x):
            return Result(self.inner(x))

    def __init__(self, inner: nn.Module):
        super().__init__(self.Inner(inner))

    def forward(self, x):
        return self.inner(x).value


class GivesNest(Wrapper):
    class Inner(Wrapper):
        def forward(self, x):
            return None, [{"out": (self.inner(x), "text")}]

    def __init__(self, inner: nn.Module):
        super().__init__(self.Inner(inner))

    def forward(self, x):
        return self.inner(x)[1][0]["out"][0]


class GivesNothing(Wrapper):
    """Keeps the result on the module."""

    class Inner(Wrapper):
        def forward(self, x):
            self.kept = self.inner(x)

    def __init__(self, inner: nn.Module):
        super().__init__(self.Inner(inner))

    def forward(self, x):
        self.inner(x)
        return self.inner.kept


class GivesGenerator(Wrapper):
    """Its forward runs when somebody asks for the result."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = matrix(), matrix()

        def forward(self, x):
            return (x @ weight for weight in (self.first, self.second))

    def __init__(self, inner: nn.Module):
        super().__init__(inner)
        self.lazy = self.Inner()

    def forward(self, x):
        return sum(self.lazy(self.inner(x)))


class Again(Wrapper):
    def forward(self, x):
        return self.inner(torch.tanh(self.inner(x)))


class Checkpointed(Wrapper):
    use_reentrant = False

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class NoGradFirst(Wrapper):
    def forward(self, x):
        with torch.no_grad():
            before = self.inner(x.clone())
        return self.inner(x) + before


class ByKeyword(Wrapper):
    class Inner(Wrapper):
        def forward(self, *, x):
            return self.inner(x)

    def __init__(self, inner: nn.Module):
        super().__init__(self.Inner(inner))

    def forward(self, x):
        return self.inner(x=x)


class Unregistered(Wrapper):
    """Calls a method of its inner module, not the module: no hook of it runs."""

    def forward(self, x):
        return self.inner.forward(x)


WRAPPERS: list[type[Wrapper]] = [
    *(GivesObject, GivesNest, GivesNothing, GivesGenerator, Again, Checkpointed),
    *(CheckpointedReentrant, NoGradFirst, ByKeyword, Unregistered),
]
