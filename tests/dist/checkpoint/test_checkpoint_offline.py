"""Checkpoints without an engine: state dicts, model folders for `from_pretrained`, and the command
line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.dist.checkpoint.test_export import Wide, from_pretrained, limited_memory, sums
from tests.dist.training import ds_config, start, train_zero
from tests.parity.models import batches, build
from tests.processes import fork_ranks, run_on
from tests.unit.integrations.test_hook import assert_refused
from zero.checkpoint.models import (
    consolidate,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zero.errors import UsageError
from zero.integrations.deepspeed.checkpoints import get_model_state_file, get_optim_files
from zero.optim.sharded_optimizer import precise_values
from zero.tools.cli import main
from zero.tools.inspect import facts


def train_and_save(
    rank: int, world_size: int, folder: str
) -> dict[str, dict[str, torch.Tensor]] | None:
    """Train and save a bf16 T5 with a frozen block. Return its 16-bit weights and its masters."""
    model = build("t5")
    model.encoder.block[0].requires_grad_(False)
    engine, _ = start(model, ds_config(bf16={"enabled": True}))
    train_zero(engine, batches("t5", 2))
    engine.save_checkpoint(folder, client_state={"epoch": 1})
    rounded = engine._zero3_consolidated_16bit_state_dict()
    masters = {}
    for group in engine.groups:
        values = precise_values(group).float()
        full = torch.empty(group.layout.padded)
        engine.comm.all_gather(full, values.contiguous()).wait()
        for name, slot in zip(group.param_names, group.layout.slots, strict=True):
            masters[name] = full[slot.offset : slot.end].view(slot.shape).clone()
    return {"rounded": rounded, "masters": masters} if rank == 0 else None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, dict[str, dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, run_on(2, train_and_save, str(folder))[0]


def test_fp32_state_dict_is_that_of_the_masters(checkpoint):
    folder, expected = checkpoint
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert state.keys() == build("t5").state_dict().keys()
    for name, value in expected["masters"].items():
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
        assert torch.equal(param, expected["masters"][name]), name


def test_consolidated_as_trained_loads_with_from_pretrained(checkpoint, tmp_path):
    folder, expected = checkpoint
    written = consolidate(folder, tmp_path / "model")
    assert [path.name for path in written] == ["model.safetensors", "config.json"]
    assert {*(tmp_path / "model").iterdir()} == {*written}
    state = from_pretrained(tmp_path / "model", torch.bfloat16)
    for name, value in expected["rounded"].items():
        assert torch.equal(state[name], value), name
    with safe_open(written[0], "pt") as file:
        assert "shared.weight" in file.keys() and "lm_head.weight" not in file.keys()


def test_the_script_in_a_folder_of_checkpoints_makes_a_model_of_one(checkpoint, tmp_path):
    folder, expected = checkpoint
    script, tag = Path(folder) / "zero_to_fp32.py", (Path(folder) / "latest").read_text().strip()
    assert os.access(script, os.X_OK)
    options = ["--max_shard_size", "5GB", "--safe_serialization", "-t", tag, "-d"]
    done = fork_ranks(script, folder, tmp_path, *options, nproc=0, timeout=120, imported="zero")
    assert done.returncode == 0, done.stderr
    state = from_pretrained(tmp_path, torch.float32)
    assert all(torch.equal(state[name], value) for name, value in expected["masters"].items())


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_consolidated_in_several_files_and_another_dtype(dtype, checkpoint, tmp_path):
    folder, expected = checkpoint
    written = consolidate(folder, tmp_path, dtype, max_file_bytes=20_000)
    files = [path for path in written if path.suffix == ".safetensors"]
    assert len(files) > 2 and all(path.stat().st_size < 20_000 + 5_000 for path in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["weight_map"].keys() == expected["masters"].keys()
    state = from_pretrained(tmp_path, dtype)
    for name, value in expected["masters"].items():
        assert torch.equal(state[name], value.to(dtype)), name


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
    numel = sum(value.numel() for value in expected["masters"].values())
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
