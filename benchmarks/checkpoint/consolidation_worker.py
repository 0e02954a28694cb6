"""One rank of `benchmarks.checkpoint.consolidation`: builds the model, saves it in each way,
and reports its memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import zero.hf

zero.hf.enable()  # before transformers is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import AutoModelForSeq2SeqLM  # noqa: E402
from transformers.integrations import HfDeepSpeedConfig  # noqa: E402

import zero  # noqa: E402
from benchmarks.checkpoint.worker import PeakMemory  # noqa: E402
from benchmarks.launch import report  # noqa: E402
from benchmarks.models import T5_1B, T5_42M, T5_250M, t5_config  # noqa: E402

MODELS = {"t5-1b": T5_1B, "t5-250m": T5_250M, "t5-42m": T5_42M}
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


def measure(act: Callable[[], object]) -> dict[str, float]:
    dist.barrier()
    with PeakMemory() as memory:
        start = time.perf_counter()
        act()
        dist.barrier()
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "memory": memory.extra}


def main() -> None:
    folder = Path(sys.argv[1])
    zero.comm.init_distributed(dist_backend="gloo")
    # transformers builds models inside zero.Init while this object is alive.
    ds_config = HfDeepSpeedConfig(CONFIG)
    model = AutoModelForSeq2SeqLM.from_config(t5_config(MODELS[sys.argv[2]]))
    del ds_config
    engine = zero.initialize(model=model, config=CONFIG)[0]

    def as_the_trainer_does() -> None:
        """Accelerator.get_state_dict, then `save_pretrained` on rank 0."""
        state = engine._zero3_consolidated_16bit_state_dict()
        if state is not None:
            model.save_pretrained(folder / "trainer", state_dict=state)

    ways = {
        "save_checkpoint, weights only": measure(
            lambda: engine.save_checkpoint(folder / "checkpoint")
        ),
        "save_16bit_model": measure(lambda: engine.save_16bit_model(folder / "engine")),
        "save_16bit_model, save_dtype bf16": measure(
            lambda: engine.save_16bit_model(folder / "16", save_dtype=torch.bfloat16)
        ),
        "Trainer.save_model": measure(as_the_trainer_does),
    }
    largest = max(group.layout.padded for group in engine.groups)
    report({"parameters": model.num_parameters(), "two_units": 2 * 4 * largest, "ways": ways})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
