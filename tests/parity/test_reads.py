"""Parameters that are read outside of their module's call: losses and gradients are those of plain
torch.

The forward of each model reads parameters of a module that it does not call. So at stage 3 the read
itself must unshard them. Plain torch computes the batches of all ranks in the same shapes, and
averages the losses. The engine adds in another order, so both are compared within fp32 rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zero
from tests.dist.training import sgd_engine
from tests.processes import run_on
from tests.tolerance import assert_close
from zero import fragments
from zero.errors import UsageError

WIDTH, ROWS = 8, 4
# About the inner lengths of a few layers, of the loss and of the sum over rows, in forward and
# backward.
TERMS = 100


class FusedLoss(torch.autograd.Function):
    """Mean squared error of a linear head.

    Gradients are computed in forward, as in fused cross-entropies.
    """

    @staticmethod
    def forward(ctx, hidden, weight, target):
        difference = hidden @ weight.t() - target
        scale = 2 / difference.numel()
        ctx.save_for_backward(scale * difference @ weight, scale * difference.t() @ hidden)
        return difference.square().mean()

    @staticmethod
    def backward(ctx, grad):
        to_hidden, to_weight = ctx.saved_tensors
        return grad * to_hidden, grad * to_weight, None


class SavedWeight(torch.autograd.Function):
    """A linear layer that saves its weight for backward."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ hidden


class FixedWeight(torch.autograd.Function):
    """A product that returns None as the gradient of its weight, as a loss with a teacher's head
    does.
    """

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(weight)
        return hidden @ weight

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0].t(), None


class Base(nn.Module):
    """A body that is called, and a head whose weight is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.result(torch.tanh(self.body(x))), y)


class FunctionApply(Base):
    def forward(self, x, y):
        return FusedLoss.apply(torch.tanh(self.body(x)), self.head.weight, y)


class FunctionSavesWeight(Base):
    def result(self, hidden):
        return SavedWeight.apply(hidden, self.head.weight)


class FunctionGivesNone(Base):
    def result(self, hidden):
        return FixedWeight.apply(hidden, self.head.weight)


class Reentrant(Base):
    use_reentrant = True

    def result(self, hidden):
        return checkpoint(
            nn.functional.linear, hidden, self.head.weight, use_reentrant=self.use_reentrant
        )


class NonReentrant(Reentrant):
    use_reentrant = False


class OwnRead(nn.Module):
    """Returns the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self):
        return self.weight


class Returned(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = OwnRead()

    def result(self, hidden):
        return hidden @ self.head()


class Attention(Base):
    """Its output projection is read, not called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def result(self, hidden):
        return self.head(hidden[None], hidden[None], hidden[None])[0][0]


class Recurrent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def result(self, hidden):
        return self.head(hidden)[0]


class WeightNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def result(self, hidden):
        return self.head(hidden) + hidden @ self.head.weight


class OldWeightNorm(WeightNorm):
    def __init__(self) -> None:
        super().__init__()
        with pytest.warns(FutureWarning, match="weight_norm"):
            self.head = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


class Listed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.ParameterList([torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)])

    def result(self, hidden):
        return hidden @ self.head[0] + self.head[1]


class TiedTwice(Base):
    """Body and head share a weight. It is used by two calls, and read twice outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.body.weight

    def result(self, hidden):
        return (
            self.head(hidden)
            + hidden @ self.body.weight
            + nn.functional.linear(hidden, self.head.weight)
        )


class Lora(Base):
    """Merges a frozen weight with two factors in each forward, as DoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def result(self, hidden):
        merged = self.head.weight + 0.5 * self.up.weight @ self.down.weight
        return nn.functional.linear(hidden, merged / merged.norm(dim=1, keepdim=True))


class ByNumpy(Base):
    """The array shares memory with the weight, so that torch cannot free it any more."""

    def result(self, hidden):
        with torch.no_grad():
            bound = float(self.head.weight.detach().numpy().max())
        return self.head(hidden).clamp(-bound, bound)


class Root(Base):
    """Calls itself again inside of its forward, as some trainers make a model do."""

    def forward(self, x, y=None):
        if y is None:
            return torch.tanh(self.body(x)) @ self.head.weight
        return nn.functional.mse_loss(self(x), y)


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def forward_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x, y)


class Hidden(Base):
    def forward(self, x):
        return torch.tanh(self.body(x))


def outside_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Read the head after the engine's forward."""
    return FusedLoss.apply(model(x), model.head.weight, y)


def two_losses(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Run two forwards, each with a read after it, before one backward."""
    first = nn.functional.mse_loss(model(x) @ model.head.weight, y)
    return first + nn.functional.mse_loss(model(x + 1) @ model.head.weight.t(), y)


def penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() + sum(param.square().sum() for param in model.parameters())


def part(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Do not call the root at all."""
    return FusedLoss.apply(torch.tanh(model.body(x)), model.head.weight, y)


def functional(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    module = getattr(model, "module", model)
    return functional_call(module, dict(module.named_parameters()), (x, y))


MODELS = [
    *(
        FunctionApply,
        FunctionSavesWeight,
        FunctionGivesNone,
        Reentrant,
        NonReentrant,
        Returned,
        Attention,
    ),
    *(Recurrent, WeightNorm, OldWeightNorm, Listed, TiedTwice, Lora, ByNumpy, Root),
]
CASES: dict[str, tuple[type[nn.Module], Loss]] = {
    **{kind.__name__: (kind, forward_loss) for kind in MODELS},
    "functional call": (FunctionApply, functional),
    "loss outside": (Hidden, outside_loss),
    "two losses outside": (Hidden, two_losses),
    "penalty": (Hidden, penalty),
    "part of the model": (Hidden, part),
}


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return kind()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(
        ROWS, WIDTH, generator=generator
    )


def follows_plain_torch(rank: int, world_size: int, stage: int) -> None:
    for name, (kind, loss_of) in CASES.items():
        model, reference = build(kind), build(kind)
        rate = 0.1
        engine = sgd_engine(model, rate, stage=stage)
        for step in range(3):
            found = loss_of(engine, *batch(step, rank))
            expected = [loss_of(reference, *batch(step, part)) for part in range(world_size)]
            assert_close(found.detach(), expected[rank].detach(), TERMS, step + 1, name)
            engine.backward(found)
            (sum(expected) / world_size).backward()
            for key, param in reference.named_parameters():
                if param.requires_grad:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
                    grad = fragments.safe_get_full_grad(dict(model.named_parameters())[key])
                    assert_close(grad, param.grad, TERMS, step + 1, f"{name}, step {step}, {key}")
            engine.step()
            assert engine.residency.live == 0, name
            with torch.no_grad():
                for param in reference.parameters():
                    if param.requires_grad:
                        param -= rate * param.grad
                        param.grad = None
        engine.destroy()


@pytest.mark.parametrize(("stage", "world_size"), [(2, 2), (3, 1), (3, 2)])
def test_reads_outside_of_the_owners_call(stage, world_size):
    run_on(world_size, follows_plain_torch, stage)


def shows(rank: int, world_size: int) -> None:
    """A sharded parameter stays the same object and leaf, with its true shape.

    Between passes its values cannot be read.
    """
    model = build(Hidden)
    weight = model.head.weight
    engine = sgd_engine(model)
    assert model.head.weight is weight and isinstance(weight, nn.Parameter) and weight.is_leaf
    assert (
        weight.shape == (WIDTH, WIDTH)
        and weight.numel() == WIDTH**2
        and weight.dtype == torch.float32
    )
    calls = engine.comm.calls["all_gather"]
    assert model.state_dict()["head.weight"].shape == weight.shape
    assert torch.zeros_like(weight).eq(0).all()
    with torch.no_grad():
        engine(*batch(0, rank)[:1])
        assert "'head.weight', sharded over the ranks, shape=(8, 8)" in repr(weight)
        assert weight.requires_grad
    assert engine.comm.calls["all_gather"] == calls + 1, "only the body was unsharded"
    with zero.GatheredParameters(weight):
        assert type(weight) is nn.Parameter and weight.isfinite().all()
    with pytest.raises(UsageError, match="would read the values of parameter 'head.weight'"):
        weight.isnan()


def test_between_passes_a_sharded_parameter_shows_no_values():
    run_on(2, shows)
