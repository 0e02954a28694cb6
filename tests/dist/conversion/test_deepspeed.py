"""Runs of the real DeepSpeed go on with zero, at the losses that they had with DeepSpeed.

`tests/fixtures/deepspeed/make.py` has made the checkpoints and these losses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

import zero
from benchmarks.adopt.__main__ import SAVED, TOLERANCE, difference, resume
from benchmarks.adopt.worker import run
from tests.fixtures.deepspeed.make import CASES, HERE
from tests.processes import run_on
from tests.tolerance import rounding
from zero.checkpoint.files import Stored
from zero.conversion import deepspeed, pickles
from zero.conversion.training_state import TrainingState
from zero.errors import UsageError
from zero.tools.cli import main

EXACT = [name for name, (_, _, others) in CASES.items() if not others]


def go_on(rank: int, world_size: int, folders: dict[str, Path]) -> dict[str, list[float]]:
    """Resume each case from a folder, and return the losses of ten steps."""
    found = {}
    for name, folder in folders.items():
        model, stage, others = CASES[name]
        settings = resume(model, stage, folder)
        settings["config"] |= others
        found[name] = run(zero, settings)
    return found


def uninterrupted(name: str) -> list[float]:
    return json.loads((HERE / name / "losses.json").read_text())


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_losses(nproc: int) -> None:
    folders = {name: HERE / name for name in (CASES if nproc == 2 else EXACT)}
    before = sorted(path.stat().st_mtime_ns for path in HERE.rglob("*.pt"))
    resumed = run_on(nproc, go_on, folders)[0]
    assert before == sorted(path.stat().st_mtime_ns for path in HERE.rglob("*.pt"))
    for name, losses in resumed.items():
        others = CASES[name][-1]
        dtype = torch.bfloat16 if "bf16" in others else torch.float16
        allowed = rounding(dtype, 1, 1) if others else TOLERANCE
        assert difference(losses, uninterrupted(name)) <= allowed, name


def test_schedule_of_adapters_fits_param_groups_that_deepspeed_removed(tmp_path: Path) -> None:
    """The Trainer makes two param groups, and adapters have nothing in the second one."""
    folder, out = shutil.copytree(HERE / "lora-3", tmp_path / "checkpoint-3"), tmp_path / "adopted"
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    schedule = {"last_epoch": SAVED, "base_lrs": [1.0], "_last_lr": [0.5], "lr_lambdas": [None]}
    torch.save(schedule, folder / "scheduler.pt")
    with pytest.raises(RuntimeError, match=r"for 1 param group\(s\).*has 2.*zero adopt"):
        run_on(1, go_on, {"lora-3": folder})
    main(["adopt", str(folder), str(out)])
    groups = [{"params": [torch.zeros(1)]}, {"params": []}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    resumed = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    resumed.load_state_dict(torch.load(out / "scheduler.pt"))
    optimizer.step()
    resumed.step()
    assert resumed.get_last_lr() == [1 / (2 + SAVED)] * 2


def same(first: TrainingState, second: TrainingState) -> None:
    assert first.groups == second.groups and first.tied == second.tied
    assert first.parameters.keys() == second.parameters.keys()
    for name, here in first.parameters.items():
        there = second.parameters[name]
        assert torch.equal(here.weights.tensor(), there.weights.tensor())
        assert (here.group, here.dtype) == (there.group, there.dtype)
        assert here.state.keys() == there.state.keys()
        for key, value in here.state.items():
            other = there.state[key]
            if isinstance(value, Stored):
                assert isinstance(other, Stored) and torch.equal(value.tensor(), other.tensor())
            else:
                assert value == other


def test_the_universal_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "optimizer_state.pt").touch()
    with pytest.raises(UsageError, match="name the checkpoint that it was made of"):
        deepspeed.read(tmp_path)


@pytest.mark.parametrize("name", ["llama-2-fp16", "t5-3-bf16"])
def test_what_is_written_for_other_ranks_is_read_again(name: str, tmp_path: Path) -> None:
    state = deepspeed.read(HERE / name)
    state.ranks = 3
    deepspeed.write(state, tmp_path)
    again = deepspeed.read(tmp_path)
    same(state, again)
    assert again.source == "DeepSpeed 0.19.8, stage 3, 3 ranks"
    for key in ("loss_scaler", "lr_scheduler", "global_steps", "global_samples", "client_state"):
        assert getattr(again, key) == getattr(state, key)


def test_padding_is_left_out(tmp_path: Path) -> None:
    """At stages 1 and 2, DeepSpeed pads a param group with an odd number of elements. It saves the
    padding of the moments, and not of the masters."""
    folder = shutil.copytree(HERE / "t5-1", tmp_path / "job")
    for path in folder.rglob("*_optim_states.pt"):
        content = tree_map_only(Stored, Stored.tensor, pickles.load(path))
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.nn.functional.pad(state[key], (0, 1), value=torch.nan)
        pickles.save(content, path)
    same(deepspeed.read(folder), deepspeed.read(HERE / "t5-1"))


@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_files_of_two_steps_are_refused(prefix: str, tmp_path: Path) -> None:
    state = deepspeed.read(HERE / "t5-3-bf16")
    state.ranks = 2
    deepspeed.write(state, tmp_path / "job")
    state.global_steps = 4
    for parameter in state.parameters.values():
        parameter.state["step"] = torch.tensor(4.0)
    deepspeed.write(state, tmp_path / "later")
    kind = "optim" if prefix else "model"
    name = f"{prefix}zero_pp_rank_1_mp_rank_00_{kind}_states.pt"
    later = tmp_path / "later" / "global_step4" / name
    shutil.copy(later, tmp_path / "job" / "global_step3" / name)
    with pytest.raises(UsageError, match="some files are of step 3 and others of step 4"):
        deepspeed.read(tmp_path / "job")


def test_other_parallelism_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(HERE / "t5-1", tmp_path / "job")
    model = folder / "global_step3" / "mp_rank_00_model_states.pt"
    shutil.copy(model, model.with_name("mp_rank_01_model_states.pt"))
    with pytest.raises(UsageError, match="mp_rank_01.*parallelism.*zero_to_fp32.py"):
        deepspeed.read(folder)
