"""Parts that read or write weights in odd ways, or have odd ones."""

from __future__ import annotations

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from tests.hunt.parts import WIDTH, Made, illegal, linear, matrix, part
from tests.hunt.structure import CalledTwice

# -- reads


@part
class ReadsAnother(Made):
    """Reads a weight of a module that it calls only later."""

    has = {"other": linear, "linear": linear}

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
class CallsItself(ReadsAnother):
    def forward(self, x, is_inside=False):
        if is_inside:
            return torch.tanh(self.linear(x)) @ self.other.weight
        return self.other(self(x, is_inside=True))


@part
class ReturnsItsWeight(Made):
    class Inner(Made):
        has = {"weight": matrix, "other": matrix}

        def forward(self, x):
            return {"out": x @ self.other, "weight": self.weight, "view": self.weight.t()}

    has = {"inner": Inner}

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
class KeepsView(CalledTwice):
    """Looks at the weight of the last forward, which plain torch shows as it is now."""

    seen: torch.Tensor | None = None

    def forward(self, x):
        scale = 1.0 if self.seen is None else 1 + self.seen.abs().mean()
        self.seen = self.linear.weight.detach()
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
    class Failing(Made):
        has = {"weight": matrix, "linear": linear}

        def forward(self, x, fails):
            y = self.linear(x @ self.weight)
            if fails:
                raise ArithmeticError
            return y

    has = {"failing": Failing}

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
class MaxNorm(Made):
    has = {"table": lambda: nn.Embedding(3, WIDTH, max_norm=1.0)}

    def forward(self, x):
        return self.table(torch.arange(len(x)) % 3) * x


@part
class EmbeddingTimesItself(nn.Module):
    """Multiplies by its own weight: unlike an embedding's, its backward needs the weight."""

    class Inner(nn.Embedding):
        def forward(self, x):
            return (super().forward(x) @ self.weight.t()) @ self.weight

    def __init__(self) -> None:
        super().__init__()
        self.table = self.Inner(3, WIDTH)

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
class Lists(Made):
    has = {
        "items": lambda: nn.ParameterList([matrix(), nn.Parameter(torch.randn(WIDTH))]),
        "named": lambda: nn.ParameterDict({"a": matrix(), "b": nn.Parameter(torch.randn(1))}),
    }

    def forward(self, x):
        hidden = torch.tanh(x @ self.items[0] + self.items[1])
        return hidden @ self.named["a"] * self.named["b"]


@part
class OddShapes(Made):
    has = {
        "scalar": lambda: nn.Parameter(torch.tensor(0.7)),
        "empty": lambda: nn.Parameter(torch.zeros(0, WIDTH)),
        "strided": lambda: nn.Parameter(torch.randn(WIDTH, WIDTH).t()),
        "long": lambda: nn.Parameter(torch.arange(WIDTH), requires_grad=False),
    }

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
class DoubleWeights(CalledTwice):
    has = {"linear": lambda: linear().double()}

    def forward(self, x):
        return super().forward(x.double()).float()


@part
class HalfPrecision(CalledTwice):
    """A part in bf16 between parts in fp32."""

    tolerance = 2e-2

    has = {"linear": lambda: linear().bfloat16()}

    def forward(self, x):
        return super().forward(x.bfloat16()).float()


@part
class Autocast(CalledTwice):
    tolerance = 2e-2

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()
