"""The command `zero consolidate`."""

from __future__ import annotations

from pathlib import Path

import torch

from zero.checkpoint.models import consolidate
from zero.errors import UsageError
from zero.tools.arguments import Parser

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def command(arguments: list[str]) -> None:
    """Run `zero consolidate ARGUMENTS`."""
    options = Parser("consolidate").parse_args(arguments)
    if options.exclude_frozen_parameters:
        raise UsageError(
            "consolidate: --exclude_frozen_parameters: a model folder needs all weights; of a "
            "checkpoint of PEFT's, only the adapters are written anyway"
        )
    options.checkpoint = Path(options.checkpoint, options.tag)
    how = DTYPES.get(options.dtype), int(options.max_file_size * 1e9), True
    print(*consolidate(options.checkpoint, options.out, *how), sep="\n")
