"""The results of a distillation: the exported student, and a model card with recipe and figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from distill.config import DistillationConfig

RECIPE = (
    "loss_type", "kd_alpha", "temperature", "temperature_schedule", "final_temperature", "beta", "skew_alpha", "top_k",
    "hidden_loss_weight", "hidden_loss_type", "layer_mapping", "attn_relation_weight", "vocab_policy", "lmbda",
    "seq_kd", "teacher_cache", "learning_rate", "max_steps", "num_train_epochs", "per_device_train_batch_size",
    "gradient_accumulation_steps", "seed",
)  # fmt: skip


def convert(folder: str | Path, dtype: str) -> None:
    """Convert the saved weights in `folder` to `dtype` ("bfloat16", "float16", "float32").

    One file at a time is in memory. Each file is replaced by one rename, so the folder can be loaded at any moment.
    """
    target = getattr(torch, dtype)
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if all(tensor.dtype == target or not tensor.is_floating_point() for tensor in tensors.values()):
            continue
        converted = {n: t.to(target) if t.is_floating_point() else t for n, t in tensors.items()}
        partial = path.with_suffix(".partial")
        save_file(converted, partial, metadata={"format": "pt"})
        partial.replace(path)
    config = Path(folder, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": dtype}, indent=2, sort_keys=True) + "\n")


def write_card(
    folder: str | Path, args: DistillationConfig, teacher: str, figures: Mapping[str, float], trained_on: str
) -> None:
    """Write the student's model card, `README.md`: its teacher and data, the recipe, and the held-out figures."""
    defaults = {field.name: field.default for field in DistillationConfig.__dataclass_fields__.values()}
    always = ("loss_type", "kd_alpha", "temperature", "learning_rate", "seed")
    recipe = {
        name: getattr(args, name) for name in RECIPE if name in always or getattr(args, name) != defaults.get(name)
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
    lines += [f"Distilled from {teacher}, on {trained_on}.", "", "## Recipe", "", "| argument | value |", "|---|---|"]
    lines += [f"| `{name}` | {value} |" for name, value in recipe.items()]
    lines += ["", "## Held-out figures", "", "| metric | value |", "|---|---|"]
    lines += [f"| {name} | {value:.4g} |" for name, value in figures.items() if isinstance(value, int | float)]
    lines += ["", "`loss` and `ppl` are cross-entropy in nats per token and its exponential.", ""]
    Path(folder, "README.md").write_text("\n".join(lines), encoding="utf-8")
