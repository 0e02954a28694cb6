"""The command `zero consolidate`."""

from __future__ import annotations

import json

import torch

from zero.checkpoint.models import MAX_FILE_BYTES, consolidate
from zero.tools.arguments import CHECKPOINT, Parser, above_zero

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def command(arguments: list[str]) -> None:
    """Run `zero consolidate ARGUMENTS`."""
    parser = Parser(
        "consolidate",
        "Turn a checkpoint into a model folder for from_pretrained, or into PEFT's adapters.",
        "output/checkpoint-500 model --dtype bf16",
        json="the written files",
    )
    dtypes = "dtype of the weights; default: the one in which they are trained"
    most = MAX_FILE_BYTES / 1e9
    parser.add_argument("checkpoint", help=CHECKPOINT)
    parser.add_argument("out", help="the folder to write to")
    parser.add_argument("--dtype", choices=DTYPES, help=dtypes)
    parser.add_argument("--max-file-size", type=above_zero, default=most, metavar="GB")
    options = parser.parse_args(arguments)
    how = DTYPES.get(options.dtype), int(options.max_file_size * 1e9), True
    written = consolidate(options.checkpoint, options.out, *how)
    files = list(map(str, written))
    print(json.dumps({"files": files}) if options.json else "\n".join(files))
