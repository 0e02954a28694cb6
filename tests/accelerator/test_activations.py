"""Activations in host memory: what several operations save is copied once, and freed after the last
one's backward.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from operator import call
from unittest import mock

import pytest
import torch

from tests.accelerator import device
from tests.processes import run_on
from zero.config import AioConfig
from zero.offload import activations, tiers
from zero.offload.activations import HostActivations
from zero.offload.tiers import Tier, scratch_file

ROWS, WIDTH = 8, 16


def outputs(tripled: torch.Tensor) -> list[torch.Tensor]:
    """Sines and cosines save their inputs."""
    every_other, expanded = tripled[:, ::2], tripled[:1].expand(ROWS, WIDTH)
    return [
        tripled.sin(),
        tripled.t().cos(),
        tripled.view(-1).sin(),
        every_other.cos(),
        expanded.cos(),
    ]


def shared(rank: int, world_size: int, folder: str | None) -> None:
    activations.MIN_BYTES = tiers.LEAST_BYTES_IN_A_FILE = 1
    activations._PIECE = 64
    file = scratch_file(folder, AioConfig()) if folder else None
    tier = Tier(torch.device("cpu"), file=file)
    x = torch.randn(ROWS, WIDTH, device=device.NAME, requires_grad=True)
    hidden = 2 * x
    expected = [hidden.sin(), hidden.t().cos(), *outputs(hidden * 3)]
    (gradient,) = torch.autograd.grad(sum(each.sum() for each in expected), x)
    del expected, hidden
    moved, used = HostActivations(x.device, tier), torch.accelerator.memory_allocated()
    for goes_back in (True, False):
        with moved.context():
            hidden = 2 * x
            found = [hidden.sin(), hidden.t().cos()]
            found += outputs(hidden * 3)
        loss = sum(each.sum() for each in found)
        copies = [weakref.ref(kept) for kept in moved._kept.values()]
        del hidden, found
        if goes_back:
            # Both versions, half of the second one, and one row, which was expanded.
            assert moved.moved_bytes == (2 * ROWS * WIDTH + ROWS * WIDTH // 2 + WIDTH) * 4
            (again,) = torch.autograd.grad(loss, x)
            assert torch.equal(again, gradient), (again - gradient).abs().max()
            del again
        del loss
        assert len(copies) == 4
        end = time.monotonic() + 10  # autograd's thread drops what it has used last a little later
        while (
            torch.accelerator.memory_allocated() > used or any(map(call, copies))
        ) and time.monotonic() < end:
            time.sleep(0.01)
        assert torch.accelerator.memory_allocated() == used and not any(map(call, copies))


@pytest.mark.parametrize("in_file", [False, True])
def test_what_several_operations_save_is_copied_once(in_file, tmp_path):
    run_on(1, shared, str(tmp_path) if in_file else None, simulated=True)


def changed(rank: int, world_size: int) -> None:
    """A copy may not have ended when the tensor is changed."""
    activations.MIN_BYTES = 1
    moved = HostActivations(torch.device(device.NAME, 0))
    for context in (contextlib.nullcontext(), moved.context()):
        x = torch.randn(ROWS, WIDTH, device=device.NAME, requires_grad=True)
        with context:
            hidden = 2 * x
            loss = hidden.sin().sum()
            hidden[0].mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    # This is why.
    assert any("writes what a copy to the host" in each for each in device.mistakes())


def test_a_change_in_place_of_what_was_saved_is_an_error_as_in_plain_torch():
    run_on(1, changed, simulated=True)


def freed(rank: int, world_size: int) -> None:
    """What is saved is freed at once, and graphs are dropped before their backward, or in its
    middle: memory is used again while copies are on their way.
    """
    activations.MIN_BYTES = 1
    moved = HostActivations(torch.device(device.NAME, 0))
    x = torch.randn(ROWS, WIDTH, device=device.NAME, requires_grad=True)

    def chain() -> torch.Tensor:
        value = x
        for _ in range(6):
            value = value.sin() * 1.1
        return value

    (expected,) = torch.autograd.grad(chain().sum(), x)
    for _ in range(3):
        with moved.context():
            first, second = chain(), chain()
        (found,) = torch.autograd.grad(second.sum(), x)  # fetches the last tensor of `first`
        del first
        assert torch.equal(found, expected)


def test_memory_that_is_freed_during_copies_is_not_overwritten():
    run_on(1, freed, simulated=True)


def conjugates(w: torch.Tensor) -> torch.Tensor:
    """Lazy conjugates and negatives share their memory with the tensors that they come from."""
    x = torch.randn(ROWS * WIDTH, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    product = (x * w).abs().sum() + (x.conj() * w.conj() * w).imag.sum()
    return product + (x.imag * w.real).sum() + (x.conj().imag * w.real * w.real).sum()


def sparse(w: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(torch.eye(ROWS * WIDTH).to_sparse(), w.real.view(-1, 1)).square().sum()


@pytest.mark.parametrize("function", [conjugates, sparse])
def test_tensors_of_other_kinds_keep_their_values(function):
    weight = torch.randn(
        ROWS * WIDTH, dtype=torch.complex64, generator=torch.Generator().manual_seed(2)
    )
    gradients = []
    for context in (contextlib.nullcontext(), HostActivations(torch.device("cpu")).context()):
        w = weight.clone().requires_grad_()
        with mock.patch.object(activations, "MIN_BYTES", 1), context:
            loss = function(w)
        gradients.append(torch.autograd.grad(loss, w)[0])
    assert torch.equal(*gradients)
