"""TRL's distillation trainers, of which the wheel has a script for the first only.

    on_policy.py distillation|gkd|gold ARGUMENTS

A test also runs all of them one after the other, and looks where their teachers are."""

from __future__ import annotations

import sys
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer, Trainer, set_seed
from trl import (
    DistillationConfig,
    DistillationTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
)
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer

TRAINERS: dict[str, tuple[Any, Any]] = {
    "distillation": (DistillationConfig, DistillationTrainer),
    "gkd": (GKDConfig, GKDTrainer),
    "gold": (GOLDConfig, GOLDTrainer),
}


def make(name: str, line: list[str]) -> Trainer:
    """Return the trainer for a command line, ready to train."""
    config, kind = TRAINERS[name]
    parser = TrlParser((ScriptArguments, config, ModelConfig))
    script, training, model = parser.parse_args_and_config(line)
    training.model_init_kwargs = {"dtype": model.dtype}
    data = load_dataset(script.dataset_name)
    trainer = kind(
        model=model.model_name_or_path,
        teacher_model=training.teacher_model_name_or_path,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        # GKD does not load it by itself.
        processing_class=AutoTokenizer.from_pretrained(
            model.model_name_or_path, padding_side="left"
        ),
        peft_config=get_peft_config(model),
    )
    # At stage 3 GOLD's `resize_token_embeddings` draws random numbers, which it does not under
    # DDP: see docs/compatibility.md.
    set_seed(training.seed)
    return trainer


def main() -> None:
    trainer = make(sys.argv[1], sys.argv[2:])
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model(trainer.args.output_dir)


if __name__ == "__main__":
    main()
