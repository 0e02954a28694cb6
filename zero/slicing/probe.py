"""Finds out which outputs of a block have a batch, and refuses blocks whose values show that they
cannot run it in slices.

Two examples of the batch are run together and one by one. They must give the same results. That
proves nothing where they do, so only blocks that are known or trusted come here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten

from zero.device import random_state, set_random_state
from zero.errors import UsageError

REMEDY = "delete activation_checkpointing.batch_slices, or use gradient_accumulation_steps"


class BlockProbe:
    """Examines the block `module`. Every method raises UsageError, with the block's `name` and the
    remedy, if slices would give other results than the whole batch.
    """

    def __init__(self, module: nn.Module, name: str):
        self.module = module
        self.name = name
        for child in module.modules():
            if isinstance(child, _BatchNorm):
                self.refuse(f"has a {type(child).__name__}")

    def refuse_objects(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None), torch.dtype)):
                self.refuse(f"is given a {type(leaf).__name__}, which has no batch to be sliced")

    @torch.no_grad()
    def compare(
        self, run: Callable[..., Any], leaves: Sequence[Any], of_batch: Sequence[bool]
    ) -> list[bool]:
        """Which outputs of `run(*leaves)` have the batch in the first dimension.

        Raises UsageError unless two examples give the same results together and one by one.
        """

        def run_rows(rows: slice) -> list[Any]:
            part = [
                leaf[rows].clone() if sliced else leaf
                for leaf, sliced in zip(leaves, of_batch, strict=True)
            ]
            try:
                output = tree_flatten(run(*part))[0]
            except (UsageError, torch.OutOfMemoryError):
                raise
            except Exception as raised:  # of any kind: the forward is somebody else's
                self.refuse(f"fails with two rows of its batch ({raised})", raised)
            if any(leaf._version for leaf, sliced in zip(part, of_batch, strict=True) if sliced):
                self.refuse("changes its input in place")
            return output

        def run_all() -> tuple[list[Any], list[Any], list[Any]]:
            both = run_rows(slice(0, 2))
            # Only now: the first run may fill caches.
            before = _versions(self.module)
            single = run_rows(slice(0, 1)), run_rows(slice(1, 2))
            for name, version in _versions(self.module).items():
                if before.get(name) != version:
                    self.refuse(f"writes to its buffer {name!r} in each slice")
            return both, *single

        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        devices = list({each.device for each in tensors if each.device.type not in ("cpu", "meta")})
        before = [torch.get_rng_state(), *map(random_state, devices)]
        with ExitStack() as without_dropout:
            for child in self.module.modules():
                if isinstance(child, nn.Dropout):
                    without_dropout.enter_context(evaluating(child))
            both, *single = run_all()
        after = [torch.get_rng_state(), *map(random_state, devices)]
        if not all(map(torch.equal, before, after)):
            # The numbers that the block draws depend on how many rows it has.
            torch.set_rng_state(before[0])
            for device, state in zip(devices, before[1:], strict=True):
                set_random_state(device, state)
            in_training = len(both)
            with evaluating(self.module):
                both, *single = run_all()
            if len(both) != in_training:
                self.refuse("draws random numbers and returns other outputs only in training")
        found = []
        for together, first, second in zip(both, *single, strict=True):
            if not isinstance(together, torch.Tensor):
                if together is not None and not (together == first == second):
                    self.refuse()
                found.append(False)
                continue
            batched = together.shape[:1] == (2,) and first.shape[:1] == (1,)
            joined = torch.cat((first, second)) if batched else second
            if together.shape != joined.shape or not (
                _close(together, joined) and (batched or _close(together, first))
            ):
                self.refuse()
            found.append(batched)
        return found

    def refuse_kept(self, first: dict[str, Any], last: dict[str, Any]) -> None:
        """Refuse attributes that differ between the first and the last slice."""
        for name, value in last.items():
            if name in first and _differ(first[name], value):
                self.refuse(f"keeps {name!r}, of which each slice has another value")

    def refuse_different(self, first: Any, last: Any) -> None:
        """Refuse an output without a batch, such as a loss of each slice, that differs."""
        if isinstance(last, torch.Tensor) and last.requires_grad and _differ(first, last):
            self.refuse("returns a tensor without a batch dimension that differs by slice")

    def refuse(
        self, why: str = "gives other values if its batch is run in slices", cause: Any = None
    ) -> NoReturn:
        raise UsageError(f"block {self.name!r} {why}: {REMEDY}") from cause


def kept_values(module: nn.Module) -> dict[str, Any]:
    """The tensors and numbers in attributes of a block, or of a module in it, and how many values
    lists and dicts have.
    """
    return {
        f"{name}.{key}".lstrip("."): len(value) if isinstance(value, (list, dict)) else value
        for name, child in module.named_modules()
        for key, value in vars(child).items()
        if isinstance(value, (torch.Tensor, int, float, list, dict))
    }


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """What changes with each buffer, whether it is written to or replaced."""
    return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}


@torch.no_grad()
def _differ(value: Any, other: Any) -> bool:
    """Whether two slices have other values."""
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return value != other
    return value is not other and (value.shape != other.shape or not _close(value, other))


def _close(values: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether they differ by no more than the rounding of different kernels."""
    if values.device.type == "meta":  # `zero estimate` follows a step without values
        return True
    if not values.is_floating_point():
        return torch.equal(values, others)
    limit = 16 * torch.finfo(values.dtype).eps
    values, others = (each.double().nan_to_num() for each in (values, others))
    return bool((values - others).norm() <= limit * others.norm())


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Turn dropout off in this context, because it draws different numbers for other shapes."""
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for child, mode in modes.items():
            child.training = mode
