"""T5 under a sharded Trainer: evaluation between steps, generation of uneven lengths, the saved
model.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.hf.trainer_runs import SCRIPTS, SHIPPED_CONFIG, column, run_plain, run_unmodified
from tests.processes import fork_ranks

ARGUMENTS: dict[str, Any] = {
    "max_steps": 6,
    "logging_steps": 1,
    "save_strategy": "no",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "warmup_steps": 1,
    "predict_with_generate": True,
    # otherwise transformers multiplies T5's loss by the world size, see docs/troubleshooting.md
    "average_tokens_across_devices": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("t5")


@pytest.fixture(scope="module")
def reports(folder):
    """Return the reports of two ranks: fp32, with an evaluation and generation after every second
    step, and bf16.
    """
    common = {**ARGUMENTS, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    arguments: dict[str, Any] = {**common, "deepspeed": str(SHIPPED_CONFIG)}
    with_evaluation = {**arguments, "eval_strategy": "steps", "eval_steps": 2}
    jobs = [
        {"model": "t5", "arguments": with_evaluation, "predict": True, "save": True},
        {"model": "t5", "arguments": {**arguments, "bf16": True, "use_cpu": True}, "save": True},
    ]
    return run_unmodified(jobs, folder / "sharded", nproc=2)


def _reload(folder) -> dict[str, Any]:
    process = fork_ranks(
        SCRIPTS / "reload.py", folder, nproc=0, timeout=120, imported="transformers"
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def reloaded(reports, folder):
    return _reload(folder / "sharded" / "output0")


def test_evaluation_between_steps_changes_nothing(reports, folder):
    reference = {
        "optimizer": "AdamW",
        "parameters": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        "factors": [0.0, 0.0, 1.0],  # WarmupLR warms up for at least two steps
    }
    arguments = {**ARGUMENTS, "per_device_train_batch_size": 4, "use_cpu": True}
    (plain,) = run_plain(
        [{"model": "t5", "arguments": arguments, "reference": reference}], folder / "plain"
    )
    sharded = reports[0]
    assert len(column(sharded, "eval_loss")) == 3
    assert column(sharded, "loss") == pytest.approx(column(plain, "loss"), rel=1e-4)
    assert column(sharded, "grad_norm") == pytest.approx(column(plain, "grad_norm"), rel=1e-3)


def test_num_parameters_is_the_true_one(reports):
    vocabulary, width, inner, layers = 64, 32, 64, 2
    attention, feed_forward = 4 * width * width, 2 * width * inner
    encoder_layer = attention + feed_forward + 2 * width
    decoder_layer = 2 * attention + feed_forward + 3 * width
    relative_bias, final_norm = 32 * 4, width
    expected = (
        vocabulary * width
        + layers * (encoder_layer + decoder_layer)
        + 2 * (relative_bias + final_norm)
    )
    assert reports[0]["parameters"] == expected


def test_saved_model_loads_in_a_fresh_process(reloaded):
    assert reloaded["missing"] == []
    assert reloaded["finite"]
    assert reloaded["dtype"] == "torch.float32"


def test_generation_of_uneven_lengths(reports, reloaded):
    """Rank 0 ends its sequences after 3 tokens, rank 1 after 7.

    Each row equals that of the saved model.
    """
    # Seq2SeqTrainer does not remove the samples that fill up the last batch.
    predictions = reports[0]["predictions"][:7]
    assert len(predictions) == len(reloaded["tokens"]) == 7
    for index, (row, expected) in enumerate(zip(predictions, reloaded["tokens"], strict=True)):
        rank = index // 2 % 2  # the ranks get batches of two samples in turn
        length = 1 + (3 if rank == 0 else 7)
        assert row[:length] == expected[:length], f"sample {index}"
        assert set(row[length:]) <= {0, -100}, f"sample {index}"


def test_bf16_trains_and_saves_16_bits(reports, folder):
    losses = column(reports[1], "loss")
    assert losses == pytest.approx(column(reports[0], "loss"), rel=0.05)
    saved = _reload(folder / "sharded" / "output1")
    assert saved["dtype"] == "torch.bfloat16"
    assert saved["finite"] and saved["missing"] == []
