"""T5 under a sharded Trainer: generation of uneven lengths, and the saved model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM

from tests.hf.scripts.jobs import EVALUATION_SAMPLES, Tokens, collate
from tests.hf.trainer_runs import SHIPPED_CONFIG, run_unmodified


def test_generation_of_uneven_lengths(tmp_path):
    """Rank 0 ends its sequences after 3 tokens, rank 1 after 7.

    Each row equals that of the saved model.
    """
    arguments: dict[str, Any] = {
        "max_steps": 3, "save_strategy": "no", "learning_rate": 1e-2, "predict_with_generate": True,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "deepspeed": str(SHIPPED_CONFIG), "output_dir": str(tmp_path / "output"),
    }  # fmt: skip
    job = {"model": "t5", "arguments": arguments, "predict": True, "save": True}
    (report,) = run_unmodified([job], tmp_path, nproc=2)
    model, info = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "output", dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"] and model.dtype == torch.float32
    batch = collate([Tokens(0, seq2seq=True)[index] for index in range(EVALUATION_SAMPLES["t5"])])
    batch.pop("labels")
    expected = model.generate(**batch, max_new_tokens=8, min_new_tokens=8).tolist()
    # Seq2SeqTrainer does not remove the samples that fill up the last batch.
    predictions = report["predictions"][:7]
    for index, (row, tokens) in enumerate(zip(predictions, expected, strict=True)):
        rank = index // 2 % 2  # the ranks get batches of two samples in turn
        length = 1 + (3 if rank == 0 else 7)
        assert row[:length] == tokens[:length], f"sample {index}"
        assert set(row[length:]) <= {0, -100}, f"sample {index}"
