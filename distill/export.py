"""What becomes of a trained student: its model card, and its upload to the hub."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from huggingface_hub import HfApi
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from distill.config import DistillationConfig
from distill.options import GenerationArguments, LossArguments
from translation.command_line import without_tokens
from translation.records import required
from zero.streaming import GatheredWhenRead

# Arguments of a run beside its losses and what its models write.
_OF_THE_RUN = (
    "teacher_cache", "learning_rate", "max_steps", "num_train_epochs", "seed",
    "per_device_train_batch_size", "gradient_accumulation_steps",
)  # fmt: skip
_ALWAYS = ("loss_type", "kd_alpha", "temperature", "learning_rate", "seed")


def write_card(
    folder: str | Path,
    args: DistillationConfig,
    teacher: str,
    figures: Mapping[str, float],
    trained_on: str,
    base: str | None = None,
) -> None:
    """Write the student's model card, `README.md`: its teacher and data, the recipe with its
    command, and the figures of training and of the held-out data. `base`: the model whose adapters
    were trained.
    """
    defaults = {field.name: field.default for field in fields(DistillationConfig)}
    own = (field.name for group in (LossArguments, GenerationArguments) for field in fields(group))
    recipe = {
        name: getattr(args, name)
        for name in (*own, *_OF_THE_RUN)
        if name in _ALWAYS or getattr(args, name) != defaults[name]
    }
    measured = {name: each for name, each in figures.items() if isinstance(each, int | float)}
    lines = [
        "---",
        "library_name: transformers",
        *([f"base_model: {base}"] if base else []),
        "tags: [knowledge-distillation]",
        "---",
        "",
        "# Distilled student",
        "",
        f"Distilled from {teacher}, on {trained_on}.",
        "",
        "## Recipe",
        "",
        "```bash",
        f"python {shlex.join(without_tokens(sys.argv))}",
        "```",
        "",
        "| argument | value |",
        "|---|---|",
        *(f"| `{name}` | {value} |" for name, value in recipe.items()),
        "",
        "## Figures",
        "",
        "| metric | value |",
        "|---|---|",
        *(f"| {name} | {value:.4g} |" for name, value in measured.items()),
        "",
        "`loss` and `ppl` are cross-entropy in nats per token and its exponential. `train_runtime` "
        "is in seconds.",
        "",
    ]
    Path(folder, "README.md").write_text("\n".join(lines), encoding="utf-8")


def save_merged(trainer: Trainer, folder: str | Path) -> None:
    """Replace the saved adapters by the whole student with its adapters merged. All ranks call this
    together, and rank 0 has the student in host memory.
    """
    adapted, weights = cast(Any, trainer.model), {}
    with GatheredWhenRead(adapted):
        student = adapted.merge_and_unload()
        saved = student.state_dict(keep_vars=True).keys()
        for name, tensor in (*student.named_parameters(), *student.named_buffers()):
            value = tensor.data  # every rank takes part in gathering it
            if trainer.args.should_save and name in saved:
                weights[name] = value.to("cpu", copy=True)
    if trainer.args.should_save:
        student.save_pretrained(folder, state_dict=weights)
        for path in Path(folder).glob("adapter_*"):  # not before: the disk may be full
            path.unlink()


def push(folder: str | Path, trainer: Trainer) -> None:
    """Upload the student as it is in `folder`. `Trainer.push_to_hub` would save it again first, in
    the dtype of training and with a card of its own.
    """
    trainer._finish_current_push()
    args = trainer.args
    HfApi().upload_folder(
        repo_id=required(trainer.hub_model_id, "hub_model_id"),
        folder_path=folder,
        commit_message="End of training",
        token=args.hub_token,
        revision=args.hub_revision,
        ignore_patterns=["_*", f"{PREFIX_CHECKPOINT_DIR}-*"],
    )
