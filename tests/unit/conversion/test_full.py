"""Folders of the Trainer: names are given to what the optimizer numbers, and what does not fit is
refused in one line."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.integrations.test_hook import assert_refused
from zero.checkpoint.files import Stored
from zero.checkpoint.models import consolidate
from zero.conversion import full, ours
from zero.conversion.named import put_optimizer
from zero.conversion.training_state import Parameter, TrainingState

STEP = 3


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def save(model: nn.Module, folder: Path) -> torch.optim.Optimizer:
    """Train for `STEP` steps, and save what the Trainer does."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for _ in range(STEP):
        for param in trained:
            param.grad = torch.rand_like(param)
        optimizer.step()
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEP}))
    torch.save({"last_epoch": STEP, "_last_lr": [1e-3]}, folder / "scheduler.pt")
    return optimizer


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's, with transformers 5
def test_adapters(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    optimizer = save(model, tmp_path / "checkpoint-3")
    state = full.read(tmp_path / "checkpoint-3")
    for name, param in model.named_parameters():
        assert (name in state.parameters) == param.requires_grad
        if param.requires_grad:
            found, expected = state.parameters[name], optimizer.state[param]
            assert torch.equal(found.weights.tensor(), param.detach())
            assert torch.equal(found.state["exp_avg"].tensor(), expected["exp_avg"])
            assert found.state["step"] == STEP
    ours.write(state, tmp_path / "out")
    consolidate(tmp_path / "out", tmp_path / "adapters")
    written, expected = (
        load_file(tmp_path / place / "adapter_model.safetensors")
        for place in ("adapters", "checkpoint-3")
    )
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[key], expected[key]) for key in expected)


def test_a_parameter_without_dimensions_keeps_its_moments() -> None:
    scalar = Stored.of(torch.tensor(3.0))
    state = TrainingState(source="test", parameters={"scale": Parameter(scalar, torch.float32)})
    optimizer = {"scale": dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), scalar)}
    put_optimizer(state, optimizer, [{"params": ["scale"], "lr": 1.0, "fused": True}], "test")
    found = state.parameters["scale"].state
    assert found["step"] == 3 and found["exp_avg"] is scalar
    assert state.groups == [{"lr": 1.0}] and state.optimizer == "AdamW"


def remove_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")


def save_other_groups(folder: Path) -> None:
    parameters = list(llama().parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    torch.save(torch.optim.AdamW(groups).state_dict(), folder / "optimizer.pt")


def keep_eight_bits(folder: Path) -> None:
    saved = torch.load(folder / "optimizer.pt")
    for state in saved["state"].values():
        state["state1"] = torch.zeros(5, dtype=torch.uint8)
    torch.save(saved, folder / "optimizer.pt")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_a_weight, "model.safetensors: model.norm.weight is missing"),
        (save_other_groups, "optimizer.pt: it has param groups of [1, 10] parameters"),
        (keep_eight_bits, "'state1' of model.embed_tokens.weight: neither a number nor a tensor"),
    ],
)
def test_refuses_in_one_line(tmp_path: Path, damage, message: str, capsys) -> None:
    save(llama(), tmp_path / "checkpoint-3")
    damage(tmp_path / "checkpoint-3")
    capsys.readouterr()  # of libraries
    assert_refused(["adopt", str(tmp_path / "checkpoint-3")], message, capsys)
    assert not (tmp_path / "checkpoint-3-zero").exists()
