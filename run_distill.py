"""Distil a teacher into a smaller student with transformers' Seq2SeqTrainer; `--deepspeed` shards both.

Without arguments this is a demonstration that needs no network (distill/demonstration.py says of what):

    python run_distill.py
    torchrun --nproc_per_node 2 run_distill.py --deepspeed configs/ds_config_distill.json
"""
# ruff: noqa: E402

import zero.hf

# transformers and accelerate look for the engine once, while they are imported: this comes before.
zero.hf.enable()

import logging
import sys

import torch.distributed
import transformers
from transformers import set_seed

from distill import demonstration
from distill.arguments import fail, is_demonstration, parse_arguments
from distill.config import DistillationConfig
from translation.records import InputError


class _Given:
    """All arguments under one name each."""

    def __init__(self, *groups: object):
        for group in groups:
            self.__dict__.update(vars(group))


def main() -> None:
    try:
        model_args, data_args, args = parse_arguments()
        start_logging(args)
        set_seed(args.seed)
        if is_demonstration(_Given(model_args, data_args, args)):
            demonstration.run(data_args, args)
    except InputError as error:
        fail(str(error))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def start_logging(args: DistillationConfig) -> None:
    """Rank 0 tells of progress, the other ranks of warnings."""
    level = logging.INFO if args.process_index == 0 else logging.WARNING
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.WARNING)
    logging.getLogger("distill").setLevel(level)
    transformers.utils.logging.set_verbosity(args.get_process_log_level())


if __name__ == "__main__":
    main()
