"""What can be around a part: it maps a part to a part."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.hunt.parts import matrix


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner


class Nested(Wrapper):
    """Has a module of its own around the part."""

    Inner: type[Wrapper]

    def __init__(self, inner: nn.Module):
        super().__init__(self.Inner(inner))


class Result:
    def __init__(self, value: torch.Tensor):
        self.value = value


class GivesObject(Nested):
    class Inner(Wrapper):
        def forward(self, x):
            return Result(self.inner(x))

    def forward(self, x):
        return self.inner(x).value


class GivesNest(Nested):
    class Inner(Wrapper):
        def forward(self, x):
            return None, [{"out": (self.inner(x), "text")}]

    def forward(self, x):
        return self.inner(x)[1][0]["out"][0]


class GivesNothing(Nested):
    """Keeps the result on the module."""

    class Inner(Wrapper):
        def forward(self, x):
            self.kept = self.inner(x)

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


class ByKeyword(Nested):
    class Inner(Wrapper):
        def forward(self, *, x):
            return self.inner(x)

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
