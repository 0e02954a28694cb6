"""Hybrid sharding beside training: checkpoints between any two ways to shard, single values,
meshes, mistakes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import zero
from tests.dist.checkpoint.test_checkpoint import (
    OTHER_CUTS,
    STEPS,
    assert_same_tensors,
    load_train,
    stored,
    train_save_train,
)
from tests.dist.toys import Toy, toy, toy_batches
from tests.dist.training import adamw, curve_on, ds_config, relative, split, start, train_zero
from tests.parity.models import batches, build
from tests.parity.test_whole_tensor import MAKE
from tests.processes import on_ranks, run_on
from tests.tolerance import rounding
from zero.core.param_group import owning_group
from zero.errors import UsageError
from zero.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)


# (ranks, section) of the writer and of the reader.
@pytest.mark.parametrize(
    "writer, reader",
    [
        ((4, {"mics_shard_size": 2}), (2, {})),
        ((2, {"stage": 2}), (4, {"mics_shard_size": 2})),
        ((4, {"mics_shard_size": 2, "stage": 1}), (2, {"mics_shard_size": 1})),
        ((2, {"mics_shard_size": 1}), (4, {"zero_hpz_partition_size": 2})),
    ],
    ids=str,
)
def test_checkpoints_hold_the_same_state_however_the_ranks_are_grouped(writer, reader, tmp_path):
    (written, section), (read, other) = writer, reader
    config, others = ds_config(clip=1.0, **section), ds_config(clip=1.0, **OTHER_CUTS | other)
    straight = curve_on(written, train_save_train, "llama", config, str(tmp_path))
    resumed = curve_on(read, load_train, "llama", others, str(tmp_path))
    assert_same_tensors(stored(tmp_path / f"again{read}"), stored(tmp_path))
    close = rounding(torch.float32, 1000, STEPS)
    assert relative(resumed.mean_losses(), straight.mean_losses()) <= close
    for folder in (tmp_path, tmp_path / f"again{read}"):
        manifest = json.loads((folder / f"global_step{STEPS}" / "checkpoint.json").read_text())
        for key, entry in manifest["tensors"].items():
            numel = sum(numel for _, numel, *_ in entry["slices"])
            assert numel == entry["numel"], f"{key} is written once"


def whole_tensors(
    rank: int, world_size: int, folder: str, section: dict[str, Any], save: bool
) -> None:
    """Train and save with an optimizer whose state has tensors of other shapes, or load that and
    save it again.
    """
    engine, _ = start(build("llama"), ds_config(**section), make=MAKE["torch's Adafactor"])
    if save:
        train_zero(engine, batches("llama", 1))
    else:
        engine.load_checkpoint(folder)
    engine.save_checkpoint(folder if save else Path(folder) / "again")


def test_whole_tensors_of_an_optimizer_are_stored_once_and_load_in_other_groups(tmp_path):
    run_on(4, whole_tensors, str(tmp_path), {"mics_shard_size": 2}, True)
    run_on(2, whole_tensors, str(tmp_path), {"mics_shard_size": 1, "stage": 1}, False)
    assert_same_tensors(stored(tmp_path / "again"), stored(tmp_path))


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
    for (name, param), own in zip(
        plain.named_parameters(), engine.module.parameters(), strict=True
    ):
        assert torch.equal(safe_get_full_fp32_param(own), param), name
        torch.testing.assert_close(safe_get_full_grad(own), param.grad, rtol=1e-5, atol=1e-8)
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
        ("size is 3, which does not divide .* processes, 2", None, {"mics_shard_size": 3}),
        ("hpz_partition_size is 4, which does not", None, {"zero_hpz_partition_size": 4}),
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
