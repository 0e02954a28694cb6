"""A run of the Trainer with another engine goes on with zero, at the losses of the run that was not
interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hf.trainer_runs import column, run_plain, run_unmodified
from zero.tools.cli import main

SAVED, STEPS, GLOBAL_BATCH = 2, 12, 4
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3},
}


def job(model: str, nproc: int = 1, **others: Any) -> dict[str, Any]:
    arguments = {
        "max_steps": STEPS, "save_steps": SAVED, "logging_steps": 1, "learning_rate": 1e-3,
        "weight_decay": 0.1, "use_cpu": True, "lr_scheduler_type": "cosine", "warmup_steps": 4,
        "per_device_train_batch_size": GLOBAL_BATCH // nproc, "save_total_limit": None,
    }  # fmt: skip
    return {"model": model, "arguments": arguments, **others}


@pytest.mark.parametrize("model", ["t5", "llama"])
def test_folder_of_the_plain_trainer(tmp_path: Path, model: str) -> None:
    (plain,) = run_plain([job(model)], tmp_path / "plain")
    folder = tmp_path / "plain" / "output0" / f"checkpoint-{SAVED}"
    adopted = tmp_path / "adopted" / folder.name
    main(["adopt", str(folder), str(adopted)])
    expected = column(plain, "loss")[SAVED:]
    for nproc in (1, 2):
        resumed = job(model, nproc, resume=str(adopted))
        resumed["arguments"]["deepspeed"] = ZERO
        (report,) = run_unmodified([resumed], tmp_path / str(nproc), nproc)
        assert column(report, "loss")[-len(expected) :] == pytest.approx(expected, rel=0, abs=1e-7)
        assert len(expected) == STEPS - SAVED
