"""Groups of ranks: single values, meshes and mistakes of hybrid sharding, and a default group that
is a Python subclass.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import zero
from tests.dist.toys import Toy, toy, toy_batches
from tests.dist.training import adamw, assert_gradients, ds_config, split, start, step
from tests.processes import on_ranks, run_on
from zero.comm import world
from zero.core.param_group import owning_group
from zero.errors import UsageError
from zero.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)


def single_values(rank: int, world_size: int, folder: str) -> int:
    """On a mesh of 2 x 2: whole values of single parameters are plain torch's.

    Returns the shard group's size.
    """
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    with zero.Init():  # over all ranks: the engine shards again
        model = toy(blocks=2)
    optimizer = adamw([{"params": model.parameters()}])
    config = ds_config(stage3_param_persistence_threshold=0)
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config, mesh=mesh)
    plain, (batch,) = toy(blocks=2), toy_batches(1)
    parts = split(batch, world_size)
    for part in parts:
        (plain(**part) / world_size).backward()
    engine.backward(engine(**parts[rank]))
    assert_gradients(engine.module, plain, 1, 100)
    for (name, param), own in zip(
        plain.named_parameters(), engine.module.parameters(), strict=True
    ):
        assert torch.equal(safe_get_full_fp32_param(own), param), name
        with zero.GatheredParameters([own]):
            assert torch.equal(own, param), name
    adamw([{"params": plain.parameters()}]).step()
    engine.step()
    for param, own in zip(plain.parameters(), engine.module.parameters(), strict=True):
        torch.testing.assert_close(safe_get_full_fp32_param(own), param, rtol=1e-5, atol=1e-6)
        moment = safe_get_full_optimizer_state(own, "exp_avg")
        torch.testing.assert_close(moment, 0.1 * param.grad, rtol=1e-5, atol=1e-8)
    head = engine.module.head.weight
    safe_set_full_fp32_param(head, torch.ones_like(plain.head.weight))
    with zero.GatheredParameters([head], modifier_rank=3):
        assert (head == 1).all()
        if rank == 3:
            head.data.fill_(2.0)
    assert (safe_get_full_fp32_param(head) == 2).all()
    weights = dict(zero.stream_weights(engine))
    assert torch.equal(weights["head.weight"], torch.full_like(plain.head.weight, 2.0))
    engine.save_16bit_model(folder)
    return engine.comm.shard_group.size


def test_whole_values_of_single_parameters_on_a_mesh(tmp_path):
    assert run_on(4, single_values, str(tmp_path)) == [2] * 4
    assert (load_file(tmp_path / "model.safetensors")["head.weight"] == 2).all()


@on_ranks(2)
def test_mistakes_are_named_before_anything_is_done(rank, world_size):
    one = (world_size,)
    cp, shard = (
        init_device_mesh("cpu", one, mesh_dim_names=(name,)) for name in ("cp", "dp_shard")
    )
    both = {"mics_shard_size": 2, "zero_hpz_partition_size": 2}
    for says, mesh, section in (
        ("size: 3 does not divide .* processes, 2", None, {"mics_shard_size": 3}),
        ("hpz_partition_size: 4 does not", None, {"zero_hpz_partition_size": 4}),
        (r"mics_shard_size \(or a mesh\) 2 and zero_hpz_partition_size 2", None, both),
        (r"\('cp',\).*'replicate', 'shard'", cp, {}),
        ("is 1, and the mesh's dimension shard has 2 ranks", shard, {"mics_shard_size": 1}),
    ):
        model, config = Toy(blocks=1), ds_config(**section)
        optimizer = adamw([{"params": model.parameters()}])
        with pytest.raises(UsageError, match=says):
            zero.initialize(model=model, optimizer=optimizer, config=config, mesh=mesh)
        assert not any(owning_group(param) for param in model.parameters()), "nothing was done"
    with pytest.raises(UsageError, match="does not divide the number of processes, 2"):
        zero.Init(config_dict_or_path=ds_config(mics_shard_size=5))


@on_ranks(4)
def test_values_that_are_read_are_exact_beside_rounded_second_shards(rank, world_size):
    """Weights travel as codes, and the second shard holds them rounded.

    Who reads them gets the exact ones.
    """
    section = {"zero_hpz_partition_size": 2, "zero_quantized_weights": True}
    section |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    engine, _ = start(toy(), ds_config(**section))
    weight = engine.module.blocks[0].up.weight
    for batch in toy_batches(2):
        engine.backward(engine(**batch))
        assert owning_group(weight).second is not None
        exact = safe_get_full_fp32_param(weight)
        engine.reshard()
        with zero.GatheredParameters([weight]):
            assert torch.equal(weight, exact)
        with owning_group(weight).unsharded():
            assert torch.equal(weight, exact)
        engine.step()


# -- a default process group in Python, as torchft's are: the engine trains beside it


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
