"""run_distill.py with a student of which only LoRA adapters are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch.nn.functional import kl_div, log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill import data
from distill.batch import IGNORED
from tests.hf import distill_runs
from tests.hf.distill_runs import LINES, log, run_jobs, save_llama, write_stage_3
from tests.tolerance import assert_close, rounding

pytestmark = [
    # More than the limits of the two processes that the fixture starts.
    pytest.mark.timeout(600),
    # PEFT reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]

ADAPTER = "adapter_model.safetensors"
LENGTH, BATCH, STEPS, RATE = 32, 4, 3, 0.5
CLOSE = rounding(torch.float32, 600, STEPS)
LORA = "--use_peft True --lora_r 4 --lora_alpha 8 --lora_dropout 0"
COMMON = (
    f"{distill_runs.COMMON} {LORA} --max_length {LENGTH} --max_train_tokens {LENGTH * BATCH} "
    f"--max_steps {STEPS} --learning_rate {RATE} --optim sgd --lr_scheduler_type constant "
    "--max_grad_norm 0 --kd_alpha 0.5 --save_strategy no --model_name_or_path {}/student "
    "--teacher_model_name_or_path {}/teacher --train_file {}/text.txt --validation_file {}/text.txt"
)
WHOLE = f"{COMMON} --per_device_train_batch_size {BATCH}"
HALF = f"{COMMON} --per_device_train_batch_size {BATCH // 2}"
STAGE_3 = "--deepspeed {}/stage3.json"
JOBS: dict[int, dict[str, str]] = {
    0: {
        "plain": WHOLE,
        "untrained": f"{COMMON} --learning_rate 0 --max_steps 1",
        "no model": f"{LORA} --do_train --student_config {{}}/student --kd_alpha 0 "
        "--train_file {}/text.txt",
        "no layers": f"{COMMON} --lora_target_modules nothing_like_it",
    },
    2: {
        "sharded": f"{HALF} {STAGE_3}",
        "merged": f"{HALF} {STAGE_3} --merge_adapters True --export_dtype float32",
        "writes": f"{COMMON} {STAGE_3} --lora_target_modules all-linear --lmbda 1 "
        "--max_new_tokens 4 --hidden_loss_weight 0.1 --attn_relation_weight 0.1",
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name, layers in (("student", 2), ("teacher", 3)):
        save_llama(folder / name, layers)
    (folder / "text.txt").write_text("".join(LINES))
    write_stage_3(folder)
    return folder


@pytest.fixture(scope="module")
def results(folder) -> dict[str, Any]:
    found = {}
    for ranks, jobs in JOBS.items():
        found |= run_jobs(folder, jobs, ranks)[0]
    return found


def by_hand(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and adapters of a loop of plain PEFT and torch."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    ids = data.encode([data.Segment("".join(LINES), True)], tokenizer)
    blocks = list(data.pack([ids], LENGTH, 0))
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name) for name in ("student", "teacher")
    )
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM")
    model = get_peft_model(student, config)
    set_peft_model_state_dict(model, load_file(folder / "untrained" / ADAPTER))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    found = []
    for _ in range(STEPS):
        batch = data.Collator(0)(blocks[:BATCH])
        labels = batch.pop("labels")[:, 1:].flatten()
        learnt = labels != IGNORED
        ours = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)[learnt]
        with torch.no_grad():
            theirs = teacher(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)[learnt]
        ours, theirs = log_softmax(ours, -1), log_softmax(theirs, -1)
        ce = -ours.gather(1, labels[learnt].unsqueeze(1)).mean()
        kd = kl_div(ours, theirs, log_target=True, reduction="sum") / learnt.sum()
        loss = 0.5 * ce + 0.5 * kd
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, get_peft_model_state_dict(model)


@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_adapters_are_trained_as_plain_peft_trains_them(name, folder, results):
    assert results[name] == results["untrained"] == [0, ""]
    expected_losses, expected = by_hand(folder)
    assert log(folder / name) == pytest.approx(expected_losses, rel=CLOSE)
    found, first = (load_file(folder / each / ADAPTER) for each in (name, "untrained"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert_close(found[key], value, 600, STEPS)
        assert not torch.equal(found[key], first[key])
    assert not list((folder / name).glob("model*.safetensors"))
    card = (folder / name / "README.md").read_text()
    assert f"base_model: {folder}/student" in card and "kd_alpha" in card


def test_a_merged_student_predicts_what_its_adapters_do(folder, results):
    assert results["merged"] == [0, ""]
    assert not (folder / "merged" / "adapter_config.json").exists()
    whole = AutoModelForCausalLM.from_pretrained(folder / "merged")
    assert whole.dtype == torch.float32
    adapted = AutoPeftModelForCausalLM.from_pretrained(folder / "plain")
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        ours, expected = whole(input_ids=ids).logits, adapted(input_ids=ids).logits
    assert_close(ours, expected, 600, STEPS)


def test_an_adapted_student_writes_and_matches_layers(folder, results):
    assert results["writes"] == [0, ""]
    assert not [key for key in load_file(folder / "writes" / ADAPTER) if "distillation" in key]


@pytest.mark.parametrize(
    "name, words",
    [
        ("no model", "--use_peft needs a trained student: give --model_name_or_path"),
        ("no layers", "--lora_target_modules: "),
    ],
)
def test_what_adapters_cannot_do_is_named(name, words, results):
    code, message = results[name]
    assert code == 2 and words in message
