"""The question to `zero estimate`, and the checks of it that do not need transformers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero.config import Config
from zero.errors import UsageError
from zero.tools.estimate.speeds import Speeds

# The configuration that a plan changes until it fits.
PLAIN: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}


@dataclass(frozen=True)
class Question:
    """What to estimate.

    `batch` and `length` describe one micro-batch on one rank; with 0, activations are left out.
    `speeds` are those of the machine. `per_host` is the number of ranks that share the memory of a
    host.
    """

    world_size: int
    batch: int = 0
    length: int = 0
    checkpointing: bool = False
    speeds: Speeds = Speeds()  # noqa: RUF009 (it is frozen)
    per_host: int = 1


def in_a_line(error: Exception) -> str:
    """What an error of a library says."""
    return " ".join(str(error).split())[:200]


def model_folder(source: str) -> Path:
    """Return the folder of a model, given the folder or its `config.json`.

    Raises UsageError if it does not exist.
    """
    folder = Path(source)
    folder = folder.parent if folder.name == "config.json" else folder
    if (folder / "config.json").is_file():
        return folder
    if (folder / "adapter_config.json").is_file():
        raise UsageError(
            f"{source}: this is an adapter (adapter_config.json): give its base model's folder, "
            f"and --adapter {source}"
        )
    hint = ""
    if not folder.exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        name = source.rpartition("/")[2]
        hint = (
            f". For a model on the hub get it first: hf download {source} config.json "
            f"--local-dir {name}, and name that folder"
        )
    raise UsageError(f"{source}: expected a model's folder with config.json, or that file{hint}")


def with_batch(config: Config, source: str, question: Question) -> tuple[Config, Question]:
    """Add the batch sizes that follow from the known ones; --batch counts before that of the file.
    Raises UsageError if they contradict each other, or if --seq needs one that is missing.

    source: the configuration's file, for the message.
    """
    micro = question.batch or config.train_micro_batch_size_per_gpu
    if micro is not None or config.train_batch_size is not None:
        config = config.model_copy(update={"train_micro_batch_size_per_gpu": micro})
        config = config.resolve(question.world_size)
    if question.length and not question.batch:
        if config.train_micro_batch_size_per_gpu is None:
            raise UsageError(
                f"--seq: give --batch too, or train_micro_batch_size_per_gpu in {source}"
            )
        question = replace(question, batch=config.train_micro_batch_size_per_gpu)
    return config, question
