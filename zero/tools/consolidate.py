"""The command `zero consolidate`."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentTypeError
from pathlib import Path

import torch

from zero.checkpoint.models import MAX_FILE_BYTES, consolidate
from zero.errors import UsageError
from zero.tools.arguments import CHECKPOINT, Parser, above_zero

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def command(arguments: list[str]) -> None:
    """Run `zero consolidate ARGUMENTS`."""
    parser = Parser(
        "consolidate",
        "Turn a checkpoint into a model folder for from_pretrained, or into PEFT's adapters.",
        "output/checkpoint-500 model --dtype bf16",
    )
    dtypes = "dtype of the weights; default: the one in which they are trained"
    most = MAX_FILE_BYTES / 1e9
    parser.add_argument("checkpoint", help=CHECKPOINT)
    parser.add_argument("out", help="the folder to write to")
    parser.add_argument("--dtype", choices=DTYPES, help=dtypes)
    parser.add_argument("--max-file-size", type=above_zero, default=most, metavar="GB")
    # The options of DeepSpeed's zero_to_fp32.py. safetensors are always written.
    parser.add_argument("--max_shard_size", dest="max_file_size", type=_size, help=SUPPRESS)
    parser.add_argument("-t", "--tag", default="", help=SUPPRESS)
    for name in (["--safe_serialization"], ["--exclude_frozen_parameters"], ["-d", "--debug"]):
        parser.add_argument(*name, action="store_true", help=SUPPRESS)
    options = parser.parse_args(arguments)
    if options.exclude_frozen_parameters:
        raise UsageError(
            "consolidate: --exclude_frozen_parameters: a model folder needs all weights; of a "
            "checkpoint of PEFT's, only the adapters are written anyway"
        )
    options.checkpoint = Path(options.checkpoint, options.tag)
    how = DTYPES.get(options.dtype), int(options.max_file_size * 1e9), True
    print(*consolidate(options.checkpoint, options.out, *how), sep="\n")


def _size(text: str) -> float:
    """The type of an option: GB, of a text such as 5GB or 500MB."""
    if not (found := re.fullmatch(r"(\d+)\s*([KMG])i?B", text.strip(), re.IGNORECASE)):
        raise ArgumentTypeError(f"{text} is not a size, such as 5GB or 500MB")
    return above_zero(found[1]) * {"K": 1e-6, "M": 1e-3, "G": 1.0}[found[2].upper()]
