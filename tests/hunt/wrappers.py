"""What can be around a part: it maps a part to a part."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.hunt.parts import Made, matrix


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner


class GivesGenerator(Wrapper):
    """Its forward runs when somebody asks for the result."""

    class Inner(Made):
        has = {"first": matrix, "second": matrix}

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
    *(GivesGenerator, Again, Checkpointed, CheckpointedReentrant, NoGradFirst, ByKeyword),
    Unregistered,
]
