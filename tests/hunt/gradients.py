"""Parts with gradients of their own."""

from __future__ import annotations

import torch

from tests.hunt.parts import WIDTH, Made, linear, part
from tests.hunt.structure import CalledTwice, Tied
from tests.hunt.values import ReadsAnother

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


class _FixedWeight(_Product):
    """Has no gradient of its weight, as a loss with a teacher's head has none."""

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[1].t(), None


@part
class FunctionGivesNone(ReadsAnother):
    def forward(self, x):
        return _FixedWeight.apply(torch.tanh(self.linear(x)), self.other.weight)


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
class Scripted(Made):
    has = {"inner": lambda: torch.jit.trace(linear(), torch.zeros(2, WIDTH))}

    def forward(self, x):
        return self.inner(x)
