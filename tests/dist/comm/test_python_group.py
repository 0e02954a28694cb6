"""A default process group that is a Python subclass, as torchft's groups are: the engine trains
beside it, in groups of its own.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.dist.toys import toy, toy_batches
from tests.dist.training import ds_config, split, start, step
from tests.processes import run_on
from zero.comm import world


class PythonGroup(dist.ProcessGroup):
    """Sends what it is given through gloo.

    It names no device, and has no options: torch asks a group in C++ for both."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, world.default_timeout())

    def allreduce(self, tensors, options):
        return self._gloo.allreduce(tensors, options)

    def broadcast(self, tensors, options):
        return self._gloo.broadcast(tensors, options)

    def allgather(self, outputs, inputs, options):
        return self._gloo.allgather(outputs, inputs, options)

    def barrier(self, opts):
        return self._gloo.barrier(opts)

    def getBackendName(self):  # noqa: N802 (torch's name)
        return "in_python"


def _make(store: dist.Store, rank: int, size: int, timeout: object) -> dist.ProcessGroup:
    return PythonGroup(store, rank, size)


def _train(rank: int, world_size: int, in_python: bool, stage: int) -> list[float]:
    if in_python:
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()  # the other rank may still be connecting, which fails if this one leaves
        dist.destroy_process_group()
        dist.Backend.register_backend("in_python", _make, devices=["cpu"])
        dist.init_process_group(
            "in_python", store=dist.PrefixStore("again", store), rank=rank, world_size=world_size
        )
        assert isinstance(dist.group.WORLD, PythonGroup)
    config = ds_config(clip=1.0, stage=stage, stage3_param_persistence_threshold=0)
    engine, _ = start(toy(), config)
    return step(engine, [split(batch, world_size)[rank] for batch in toy_batches(3)])


@pytest.mark.parametrize("stage", [1, 3])
def test_the_engine_trains_beside_a_default_group_in_python(stage: int) -> None:
    expected = run_on(2, _train, False, stage)
    assert run_on(2, _train, True, stage) == expected
