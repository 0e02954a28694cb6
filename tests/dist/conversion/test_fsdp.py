"""Runs of torch's FSDP go on with zero, and runs of zero with FSDP, at the same losses."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)

from tests.dist.toys import WIDTH, toy, toy_batches
from tests.dist.training import (
    adamw,
    ds_config,
    one_group,
    split,
    start,
    train_zero,
    trainable,
    two_groups,
)
from tests.processes import run_on
from zero.conversion import dcp
from zero.errors import DamagedCheckpointError, UsageError
from zero.tools.cli import main

SAVED, STEPS = 2, 12
HEAD = "head.weight"
# FSDP's fused steps compute the last elements of a tensor in another precision.
ROUNDING = 2 * torch.finfo(torch.float32).eps
Losses = list[float]


def fsdp2() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = toy(blocks=2, tied=True)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, adamw(two_groups(trainable(model)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list) -> Losses:
    losses = []
    for batch in batches:
        loss = model(**split(batch, dist.get_world_size())[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_parts(folder: Path, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """Save as accelerate does."""
    checkpoint.save({"model": model}, checkpoint_id=folder / dcp.MODEL_FOLDER)
    checkpoint.save({"optimizer": optimizer}, checkpoint_id=folder / dcp.OPTIMIZER_FOLDER)


def save_fsdp2(rank: int, world_size: int, folder: Path) -> Losses:
    """Train with FSDP2, and save in accelerate's two layouts on the way."""
    model, optimizer = fsdp2()
    losses = train(model, optimizer, toy_batches(SAVED))
    of_model = get_model_state_dict(model)
    save_parts(folder / "accelerate", of_model, get_optimizer_state_dict(model, optimizer))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full_model = get_model_state_dict(model, options=whole)
    full_optimizer = get_optimizer_state_dict(model, optimizer, options=whole)
    if rank == 0:
        (folder / "full").mkdir()
        torch.save(full_model, folder / "full" / "pytorch_model_fsdp.bin")
        torch.save(full_optimizer, folder / "full" / "optimizer.bin")
    return losses + train(model, optimizer, toy_batches(STEPS)[SAVED:])


def save_fsdp1(rank: int, world_size: int, folder: Path) -> Losses:
    """Train with FSDP1. Its full state dicts are not tested: on the CPU, torch gives both moments
    the memory of one."""
    fsdp = FullyShardedDataParallel
    model = fsdp(toy(blocks=2), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = adamw(one_group(trainable(model)))  # all parameters are vectors now
    losses = train(model, optimizer, toy_batches(SAVED))
    with fsdp.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        of_model, of_optimizer = model.state_dict(), fsdp.optim_state_dict(model, optimizer)
        save_parts(folder / "sharded", of_model, of_optimizer)
    return losses + train(model, optimizer, toy_batches(STEPS)[SAVED:])


def resume(rank: int, world_size: int, folder: Path, tied: bool) -> Losses:
    grouping = two_groups if tied else one_group
    engine, _ = start(toy(blocks=2, tied=tied), ds_config(), grouping)
    engine.load_checkpoint(folder)
    assert engine.global_steps == SAVED
    return [loss for (loss,) in train_zero(engine, toy_batches(STEPS)[SAVED:]).losses]


@pytest.mark.parametrize(
    ("save", "layouts"),
    [(save_fsdp2, ("accelerate", "full")), (save_fsdp1, ("sharded",))],
)
def test_from_fsdp(tmp_path: Path, save: Any, layouts: tuple[str, ...]) -> None:
    losses = run_on(2, save, tmp_path)
    for layout in layouts:
        main(["adopt", str(tmp_path / layout)])
        found = run_on(2, resume, tmp_path / f"{layout}-zero", save is save_fsdp2)
        for of_rank, expected in zip(found, losses, strict=True):
            assert of_rank == pytest.approx(expected[SAVED:], rel=ROUNDING, abs=0)


def save_zero(rank: int, world_size: int, folder: Path) -> Losses:
    engine, _ = start(toy(blocks=2, tied=True), ds_config(), two_groups)
    batches = toy_batches(STEPS)
    curve = train_zero(engine, batches[:SAVED])
    engine.save_checkpoint(folder)
    curve.losses += train_zero(engine, batches[SAVED:]).losses
    return [loss for (loss,) in curve.losses]


def load_fsdp2(rank: int, world_size: int, folder: Path) -> Losses:
    """Load as accelerate does."""
    model, optimizer = fsdp2()
    of_model = {"model": get_model_state_dict(model)}
    checkpoint.load(of_model, checkpoint_id=folder / dcp.MODEL_FOLDER)
    model.load_state_dict(of_model["model"])
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.load(state, checkpoint_id=folder / dcp.OPTIMIZER_FOLDER)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return train(model, optimizer, toy_batches(STEPS)[SAVED:])


def test_to_fsdp2(tmp_path: Path) -> None:
    losses = run_on(2, save_zero, tmp_path / "zero")
    main(["convert", str(tmp_path / "zero"), "--to", "dcp", str(tmp_path / "dcp")])
    for of_rank, expected in zip(run_on(2, load_fsdp2, tmp_path / "dcp"), losses, strict=True):
        assert of_rank == pytest.approx(expected[SAVED:], rel=ROUNDING, abs=0)


# -- damaged folders


def saved_by_one(folder: Path) -> None:
    """Save as accelerate does, from one process."""
    model = toy(blocks=1)
    optimizer = adamw(one_group(trainable(model)))
    for batch in toy_batches(SAVED):
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    parts = {
        dcp.MODEL_FOLDER: {"model": model.state_dict()},
        dcp.OPTIMIZER_FOLDER: {"optimizer": get_optimizer_state_dict(model, optimizer)},
    }
    for name, content in parts.items():
        checkpoint.save(content, checkpoint_id=folder / name, no_dist=True)


def doubled(entry: Any) -> None:
    entry.chunks *= 2


def enlarged(entry: Any) -> None:
    entry.size = torch.Size([WIDTH + 1, WIDTH])


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("damage", [doubled, enlarged])
def test_chunks_that_overlap_or_leave_a_hole_are_refused(damage: Any, tmp_path: Path) -> None:
    saved_by_one(tmp_path)
    path = tmp_path / dcp.MODEL_FOLDER / dcp.METADATA
    metadata = pickle.loads(path.read_bytes())
    damage(metadata.state_dict_metadata[f"model.{HEAD}"])
    path.write_bytes(pickle.dumps(metadata))
    said = f"{dcp.METADATA}: model.{HEAD} has chunks that overlap"
    with pytest.raises(DamagedCheckpointError, match=said):
        dcp.read(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_an_optimizer_of_a_later_step_is_refused(tmp_path: Path) -> None:
    saved_by_one(tmp_path)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": SAVED}))
    assert dcp.read(tmp_path).global_steps == SAVED
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": SAVED - 1}))
    message = f"state is of step {SAVED}, and the rest of the checkpoint of step {SAVED - 1}"
    with pytest.raises(UsageError, match=message):
        dcp.read(tmp_path)
