"""Distil a teacher into a smaller student with transformers' Seq2SeqTrainer. `--deepspeed` shards
both.

Without models and data this is a demonstration that needs no network (see
examples/demonstration/distillation.py):

    python run_distill.py
    torchrun --nproc_per_node 2 run_distill.py --deepspeed configs/ds_config_zero3.json

`run_distill.py cache_teacher ...` writes a teacher's probabilities to files, so that students can
learn without the teacher. See docs/distillation.md."""
# ruff: noqa: E402

import sys

from distill.options import APPLICATION, DataArguments

if __name__ == "__main__":
    APPLICATION.answer(sys.argv[1:])  # before the other imports, which take seconds

import zero.hf

# This must come first: transformers and accelerate look for the engine once, while they are
# imported.
zero.hf.enable()

import logging
from types import SimpleNamespace

import torch.distributed
import transformers
from transformers import set_seed

from distill import pipeline
from distill.arguments import is_demonstration, parse_arguments
from distill.cache import CacheError
from distill.config import DistillationConfig
from translation.records import InputError


def main() -> None:
    argv = sys.argv[1:]
    caching = argv[:1] == ["cache_teacher"]
    try:
        model_args, data_args, args = arguments = parse_arguments(
            argv[1:] if caching else argv, caching
        )
        start_logging(args)
        set_seed(args.seed)
        if caching:
            pipeline.cache_teacher(arguments)
        elif is_demonstration(SimpleNamespace(**vars(model_args), **vars(data_args), **vars(args))):
            demonstrate(data_args, args)
        else:
            pipeline.run(arguments)
    except (InputError, CacheError, ImportError) as error:
        APPLICATION.fail(str(error))


def demonstrate(data_args: DataArguments, args: DistillationConfig) -> None:
    """Run the demonstration, which is a part of the checkout alone."""
    try:
        from examples.demonstration import distillation
    except ImportError as error:
        raise InputError(
            f"the demonstration cannot be started ({error}): give your own data and models, or run "
            "the script in a checkout"
        ) from error
    distillation.run(data_args, args)


def start_logging(args: DistillationConfig) -> None:
    """Rank 0 prints progress, and the other ranks print only warnings."""
    level = logging.INFO if args.process_index == 0 else logging.WARNING
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.WARNING)
    for name in ("distill", "examples"):
        logging.getLogger(name).setLevel(level)
    transformers.utils.logging.set_verbosity(args.get_process_log_level())


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
