"""A lack of host memory, as `ulimit -v` makes it: adapted to where activations are in it, and
explained.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from tests.dist.training import ds_config, relative, start, step
from tests.parity.models import build
from tests.processes import run_on

ROWS = 768
LITTLE = 15 << 20
NO_LIMIT = resource.RLIM_INFINITY


def limit(nbytes: int) -> None:
    """Let this process allocate `nbytes` more."""
    in_use = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = in_use * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, NO_LIMIT))


def train(rank: int, world_size: int, act: str, nbytes: int) -> list[float] | str:
    """The losses, or what is said if memory is not enough."""
    torch.manual_seed(3)
    ids = torch.randint(3, 97, (ROWS, 16))
    engine, _ = start(build("llama"), ds_config(stage=1) | {"on_out_of_memory": act})
    losses = step(engine, [{"input_ids": ids[:2], "labels": ids[:2]}])
    limit(nbytes)
    try:
        return losses + step(engine, [{"input_ids": ids, "labels": ids}])
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (NO_LIMIT, NO_LIMIT))


def test_a_lack_of_host_memory_is_adapted_to_and_explained():
    cases = ("explain", 1 << 34), ("explain", LITTLE), ("adapt", LITTLE)
    usual, text, losses = (run_on(1, train, *case)[0] for case in cases)
    assert relative(losses, usual) < 1e-5
    assert "in host memory on this rank: activations and temporary tensors" in text
