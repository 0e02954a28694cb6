"""Consolidated weights, of an engine and of a checkpoint: they are right, only rank 0 has them,
saving takes the memory of two groups, and `from_pretrained` and the command line read them.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import T5ForConditionalGeneration

import zero
from tests.dist.checkpoint.test_checkpoint_faults import lift_file_size_limit, limit_file_size
from tests.dist.toys import toy
from tests.dist.training import ds_config, split, start, step, train_zero, weights_of
from tests.parity.models import batches, build
from tests.processes import fork_ranks, run_on
from tests.unit.integrations.test_hook import assert_refused
from zero.checkpoint.export import copied_state_dict
from zero.checkpoint.models import (
    consolidate,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zero.core.sharded_param import PlaceholderView
from zero.errors import UsageError
from zero.integrations.deepspeed.checkpoints import get_model_state_file, get_optim_files
from zero.optim.sharded_optimizer import precise_values
from zero.tools.cli import main
from zero.tools.inspect import facts


def test_a_copy_of_a_state_dict_keeps_ties_and_values():
    model = toy(tied=True)
    copies, expected = copied_state_dict(model.state_dict(), rank=0), weights_of(model)
    with torch.no_grad():
        model.stem.weight.zero_()
    assert list(copies) == list(expected) and all(
        torch.equal(copies[name], expected[name]) for name in expected
    )
    assert len({value.untyped_storage().data_ptr() for value in copies.values()}) == len(copies) - 1


class Wide(nn.Module):
    """Sixteen groups of 4 MB each in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(16)])


def private_memory() -> int:
    """Return the bytes of this process's private writable memory.

    Memory-mapped files do not count.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


@contextmanager
def limited_memory(extra: int) -> Iterator[None]:
    """Limit private memory to `extra` bytes more than now.

    That is too little for a whole `Wide`.
    """
    former = resource.getrlimit(resource.RLIMIT_DATA)
    ctypes.CDLL(None).malloc_trim(0)  # so that malloc has no free memory in reserve
    resource.setrlimit(resource.RLIMIT_DATA, (private_memory() + extra, former[1]))
    try:
        with pytest.raises(OSError, match="allocate memory"):
            mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, former)


def sums(state: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: value.double().sum().item() for name, value in state.items()}


def within_two_groups(rank: int, world_size: int, folder: str) -> dict[str, float]:
    config = ds_config(stage3_param_persistence_threshold=0)
    engine = zero.initialize(model=Wide(), config=config)[0]
    start(toy(), ds_config())[0].save_16bit_model(folder)  # makes threads and connections
    group = 4 * 1024**2
    # Two groups, and a shard of one if the dtype changes. The rest is for malloc's arenas and
    # messages.
    with limited_memory(2 * group + group // 2 + 16 * 2**20):
        engine.save_16bit_model(folder)
        engine.save_16bit_model(folder + "/bf16", save_dtype=torch.bfloat16)
        state = engine._zero3_consolidated_16bit_state_dict()
    return sums(state or {})


@pytest.mark.skipif(sys.platform != "linux", reason="the limit exists on Linux only")
def test_no_rank_needs_more_memory_than_two_groups(tmp_path):
    gathered, other = run_on(2, within_two_groups, str(tmp_path))
    torch.manual_seed(0)  # as run_on does
    assert gathered == sums(Wide().state_dict()) and other == {}
    assert sums(load_file(tmp_path / "model.safetensors")) == gathered
    rounded = load_file(tmp_path / "bf16" / "model.safetensors")
    assert rounded["layers.3.weight"].dtype == torch.bfloat16


def saving(rank: int, world_size: int, folder: str, allowed: bool) -> tuple[bool, dict | None]:
    model = toy()
    model.blocks[1].requires_grad_(False)
    engine, _ = start(model, ds_config(stage3_gather_16bit_weights_on_model_save=allowed))
    assert engine.zero_gather_16bit_weights_on_model_save() is allowed
    trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True) or {}
    assert not [name for name in trained if "blocks.1." in name]
    # OpenRLHF asks for the weights itself, whatever the setting.
    weights = engine._consolidated_16bit_state_dict()
    return engine.save_16bit_model(folder, "weights.safetensors"), weights


def test_saving_needs_the_setting(tmp_path):
    path = tmp_path / "new" / "weights.safetensors"
    (saved, weights), (saved_on_1, none) = run_on(2, saving, str(path.parent), False)
    assert not (saved or saved_on_1 or path.exists()) and weights and none is None
    assert all(saved for saved, _ in run_on(2, saving, str(path.parent), True))
    expected = weights_of(toy())
    for found in (weights, load_file(path)):
        assert found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in expected
        )


MODES = {
    "as trained": (3, None),
    "fp16": (3, torch.float16),
    "stage 2": (2, torch.float32),
    "one file": (1, torch.bfloat16),
}


def save_t5(rank: int, world_size: int, folder: str) -> None:
    """Save into the same folders twice.

    Files of the earlier save, with other file sizes, must be gone.
    """
    for name, (stage, dtype) in MODES.items():
        engine, _ = start(build("t5"), ds_config(bf16={"enabled": True}, stage=stage))
        train_zero(engine, batches("t5", 2))
        for most in (10_000, 10**9 if name == "one file" else 20_000):
            engine.save_16bit_model(Path(folder) / name, save_dtype=dtype, max_file_bytes=most)
        engine.save_checkpoint(Path(folder) / name / "checkpoint")
    with pytest.raises(UsageError, match="'bf16': give one such as torch.bfloat16"):
        engine.save_16bit_model(folder, save_dtype="bf16")


def from_pretrained(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model, report = T5ForConditionalGeneration.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert model.dtype == dtype
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.state_dict()


def test_saved_models_load_with_from_pretrained(tmp_path):
    run_on(2, save_t5, str(tmp_path))
    for name, (_, dtype) in MODES.items():
        folder, dtype = tmp_path / name, dtype or torch.bfloat16
        files = sorted(path.name for path in folder.glob("*.*"))
        assert len(files) > 4 or name == "one file"
        assert name != "one file" or files == ["config.json", "model.safetensors"]
        masters = get_fp32_state_dict_from_zero_checkpoint(folder / "checkpoint")
        for key, value in from_pretrained(folder, dtype).items():
            # transformers keeps some weights of an fp16 T5 in fp32
            assert torch.equal(value, masters[key].to(dtype).to(value.dtype)), (name, key)


def save_to_a_full_disk(rank: int, world_size: int, folder: str) -> str:
    engine, _ = start(build("t5"), ds_config())
    limit_file_size(1 - rank)
    try:
        with pytest.raises(OSError) as caught:
            engine.save_16bit_model(folder)
    finally:
        lift_file_size_limit()
    engine.save_16bit_model(folder)  # all ranks are still in step
    return str(caught.value)


def test_a_full_disk_is_an_error_on_every_rank_and_leaves_nothing(tmp_path):
    first, second = run_on(2, save_to_a_full_disk, str(tmp_path))
    assert first == second and "rank 0" in first and "File too large" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def saved_without_a_state_dict(rank: int, world_size: int, folder: str) -> tuple[dict, list[bool]]:
    """Save as sentence-transformers does: all ranks gather the weights, then all save a module of
    the model.
    """
    model = build("t5")
    engine, _ = start(model, ds_config(stage3_param_persistence_threshold=40))
    with pytest.raises(
        UsageError, match=r"would read the values .*get_state_dict\(engine\)\), on all ranks"
    ):
        engine.save_pretrained(folder)
    train_zero(engine, batches("t5", 1))
    gathered = engine._zero3_consolidated_16bit_state_dict()  # kept while the model is saved
    model.save_pretrained(folder)
    inner = dict(model.encoder.state_dict())
    gathered = {name: value.clone() for name, value in gathered.items()} if rank == 0 else gathered
    shown = [inner["embed_tokens.weight"].is_meta]
    del inner
    shown.append(rank == 0 and isinstance(model.state_dict()["shared.weight"], PlaceholderView))
    (batch,) = batches("t5", 1)
    step(engine, split(batch, world_size)[rank::world_size])
    shown.append(isinstance(model.state_dict()["shared.weight"], PlaceholderView))
    return gathered, shown


def test_state_dict_has_what_was_gathered_until_it_is_let_go_or_stale(tmp_path):
    (expected, first), (_, second) = run_on(2, saved_without_a_state_dict, str(tmp_path))
    saved = T5ForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    assert first == [False, True, True] and second == [True, False, True]


# -- of a checkpoint, without an engine


def train_and_save(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    """Train and save a bf16 T5 with a frozen block. Return its masters."""
    model = build("t5")
    model.encoder.block[0].requires_grad_(False)
    engine, _ = start(model, ds_config(bf16={"enabled": True}))
    train_zero(engine, batches("t5", 2))
    engine.save_checkpoint(folder, client_state={"epoch": 1})
    masters = {}
    for group in engine.groups:
        values = precise_values(group).float()
        full = torch.empty(group.layout.padded)
        engine.comm.all_gather(full, values.contiguous()).wait()
        for name, slot in zip(group.param_names, group.layout.slots, strict=True):
            masters[name] = full[slot.offset : slot.end].view(slot.shape).clone()
    return masters


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, run_on(2, train_and_save, str(folder))[0]


def test_fp32_state_dict_is_that_of_the_masters(checkpoint):
    folder, expected = checkpoint
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert state.keys() == build("t5").state_dict().keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    assert state["lm_head.weight"] is state["shared.weight"]
    trained = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert set(state.keys() - trained.keys()) == {
        n for n in state if n.startswith("encoder.block.0.")
    }


def test_load_into_an_ordinary_model(checkpoint):
    folder, expected = checkpoint
    model = load_state_dict_from_zero_checkpoint(build("t5"), folder, tag="global_step2")
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name]), name


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_consolidated_model_loads_with_from_pretrained(dtype, checkpoint, tmp_path):
    """As trained in one file, or in another dtype in several."""
    folder, expected = checkpoint
    written = consolidate(folder, tmp_path, dtype, 10**9 if dtype is None else 20_000)
    assert {*tmp_path.iterdir()} == {*written}
    files = [path.stat().st_size for path in written if path.suffix == ".safetensors"]
    assert len(files) == 1 if dtype is None else len(files) > 2 and max(files) < 20_000 + 5_000
    dtype = dtype or torch.bfloat16
    state = from_pretrained(tmp_path, dtype)
    for name, value in expected.items():
        assert torch.equal(state[name], value.to(dtype)), name


def test_the_script_in_a_folder_of_checkpoints_makes_a_model_of_one(checkpoint, tmp_path):
    folder, expected = checkpoint
    script, tag = Path(folder) / "zero_to_fp32.py", (Path(folder) / "latest").read_text().strip()
    assert os.access(script, os.X_OK)
    options = ["--max_shard_size", "5GB", "--safe_serialization", "-t", tag, "-d"]
    done = fork_ranks(script, folder, tmp_path, *options, nproc=0, timeout=120, imported="zero")
    assert done.returncode == 0, done.stderr
    state = from_pretrained(tmp_path, torch.float32)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def save_adapters(rank: int, world_size: int, folder: Path) -> None:
    prefixes = {"num_virtual_tokens": 2, "encoder_hidden_size": 8, "prefix_projection": True}
    for name, config in {
        "lora": peft.LoraConfig(target_modules=["q_proj", "embed_tokens"]),
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", **prefixes),
    }.items():
        engine, _ = start(peft.get_peft_model(build("llama"), config), ds_config())
        engine.save_checkpoint(folder / name, exclude_frozen_parameters=True)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_what_a_folder_of_peft_cannot_have_is_named(tmp_path, caplog):
    run_on(1, save_adapters, tmp_path)
    consolidate(tmp_path / "lora", tmp_path / "out")
    assert "without base_model.model.model.embed_tokens.base_layer.weight" in caplog.text
    with pytest.raises(UsageError, match="already holds a model .adapter_model.safetensors"):
        consolidate(tmp_path / "lora", tmp_path / "out")
    with pytest.raises(UsageError, match="PEFT computes 'prompt_embeddings' of the adapter 'def"):
        consolidate(tmp_path / "prefix", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def consolidate_in_little_memory(rank: int, world_size: int, folder: str) -> dict[str, float]:
    """Consolidate a model of 64 MB, with 128 MB of optimizer state, in 40 MB of memory."""
    engine, _ = start(Wide(), ds_config())
    loss = sum(layer(torch.ones(1, 1024)).square().mean() for layer in engine.module.layers)
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder)
    # so that nothing has to be imported under the limit
    consolidate(folder, Path(folder) / "first")
    torch.set_num_threads(1)  # the stack of one more thread would take half of the limit
    with limited_memory(40 * 2**20):
        consolidate(folder, Path(folder) / "model")
    return sums(dict(engine.module.named_parameters()))


@pytest.mark.skipif(sys.platform != "linux", reason="the limit exists on Linux only")
def test_consolidate_needs_little_memory(tmp_path):
    (expected,) = run_on(1, consolidate_in_little_memory, str(tmp_path))
    assert sums(load_file(tmp_path / "model" / "model.safetensors")) == expected


def test_command_line(checkpoint, tmp_path, capsys):
    folder, expected = checkpoint
    main(["inspect", str(folder)])
    out = capsys.readouterr().out
    numel = sum(value.numel() for value in expected.values())
    for part in ("AdamW", "bfloat16", "verified", "epoch", f"parameters          {numel:,}"):
        assert part in out, out
    found = json.loads(json.dumps(facts(folder)))
    assert (found["ranks"], found["stage"], found["steps"]) == (2, 3, 2)
    assert found["bytes"]["optimizer exp_avg_sq"] > 0

    consolidates = ["consolidate", str(folder), str(tmp_path / "model"), "--dtype", "fp16"]
    main(consolidates)
    assert "model.safetensors" in capsys.readouterr().out
    assert_refused(consolidates, "already holds a model", capsys)


def test_files_that_lightning_reads(checkpoint):
    """Lightning's converter unpickles two files, which are made from the checkpoint."""
    folder = checkpoint[0] / (checkpoint[0] / "latest").read_text()
    (optimizer,) = get_optim_files(folder)
    stage = torch.load(optimizer, weights_only=False)["optimizer_state_dict"]["zero_stage"]
    assert stage == 3 and torch.load(get_model_state_file(folder, stage), weights_only=False) == {
        "epoch": 1
    }
    with pytest.raises(ValueError, match="checkpoint.json is missing"):
        get_optim_files(checkpoint[0])
