"""The model card of a student: its teacher and data, the recipe, and the held-out figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from distill.config import DistillationConfig

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
) -> None:
    """Write the student's model card, `README.md`: its teacher and data, the recipe, and the
    held-out figures.
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
        "| argument | value |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {value} |" for name, value in recipe.items()]
    lines += ["", "## Held-out figures", "", "| metric | value |", "|---|---|"]
    lines += [
        f"| {name} | {value:.4g} |"
        for name, value in figures.items()
        if isinstance(value, int | float)
    ]
    lines += ["", "`loss` and `ppl` are cross-entropy in nats per token and its exponential.", ""]
    Path(folder, "README.md").write_text("\n".join(lines), encoding="utf-8")
