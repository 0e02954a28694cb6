"""What becomes of a trained student: its model card, and its upload to the hub."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from huggingface_hub import HfApi
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from distill.config import DistillationConfig
from translation.command_line import without_tokens
from translation.records import required
from zero.engine import ZeroEngine
from zero.streaming import stream_weights

RECIPE = (
    "loss_type", "kd_alpha", "temperature", "temperature_schedule", "final_temperature", "beta",
    "skew_alpha", "top_k",
    "hidden_loss_weight", "hidden_loss_type", "layer_mapping", "attn_relation_weight",
    "vocab_policy", "lmbda",
    "seq_kd", "teacher_cache", "learning_rate", "max_steps", "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps", "seed",
)  # fmt: skip


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
    defaults = {
        field.name: field.default for field in DistillationConfig.__dataclass_fields__.values()
    }
    always = ("loss_type", "kd_alpha", "temperature", "learning_rate", "seed")
    recipe = {
        name: getattr(args, name)
        for name in RECIPE
        if name in always or getattr(args, name) != defaults.get(name)
    }
    lines = [
        "---",
        "library_name: transformers",
        *([f"base_model: {base}"] if base else []),
        "tags: [knowledge-distillation]",
        "---",
        "",
        "# Distilled student",
        "",
    ]
    lines += [
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
    ]
    lines += [f"| `{name}` | {value} |" for name, value in recipe.items()]
    lines += ["", "## Figures", "", "| metric | value |", "|---|---|"]
    lines += [
        f"| {name} | {value:.4g} |"
        for name, value in figures.items()
        if isinstance(value, int | float)
    ]
    lines += [
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
    adapted = cast(Any, trainer.model)
    student, weights = adapted.get_base_model(), None
    if trainer.args.deepspeed:
        weights = {}
        engine = cast(ZeroEngine, trainer.model_wrapped)
        for name, value in stream_weights(engine, merge_adapters=True):
            if trainer.args.should_save:
                weights[name] = value.to("cpu", copy=True)
    elif trainer.args.should_save:
        student = adapted.merge_and_unload()
    if trainer.args.should_save:
        for path in Path(folder).glob("adapter_*"):
            path.unlink()
        student.save_pretrained(folder, state_dict=weights)


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
