"""Command-line arguments of run_distill.py, and the checks that are possible before work begins."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import cast

import torch
from torch import accelerator

from distill.config import DistillationConfig, needs_teacher
from distill.config import check as check_distillation
from distill.options import APPLICATION, DataArguments, ModelArguments
from translation import arguments as shared
from translation.command_line import is_installed
from translation.records import InputError, check_name
from zero.config.load import read

Arguments = tuple[ModelArguments, DataArguments, DistillationConfig]

_IN_DS_CONFIG = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "warmup_steps": "scheduler.params.warmup_num_steps",
}


def is_demonstration(given) -> bool:
    """Whether neither a model, a teacher nor data is named."""
    names = (
        "model_name_or_path student_config train_file validation_file "
        "teacher_model_name_or_path teacher_cache"
    )
    return not any(getattr(given, name) for name in names.split())


def parse_arguments(argv: Sequence[str] | None = None, caching: bool = False) -> Arguments:
    """Parse and check the command line. Training arguments are created last, because they may start
    the process group.

    `caching`: the command line is that of `run_distill.py cache_teacher`.

    Raises:
        InputError: a value, file or configuration cannot work. The message names it and the remedy.
    """
    parser = shared.ArgumentParser(APPLICATION, ModelArguments, DataArguments, DistillationConfig)
    # The Trainer would log every 500 steps, which many students do not take.
    parser.set_defaults(use_cpu=not accelerator.is_available(), logging_steps=10)
    given = parser.parse_args(argv)
    if given.deepspeed is not None:
        parser.set_defaults(**_settings_in(given.deepspeed))
        given = parser.parse_args(argv)
    if caching:
        given.output_dir = given.output_dir or given.teacher_cache
    elif is_demonstration(given):
        settings = _settings_in(given.deepspeed) if given.deepspeed else {}
        parser.set_defaults(**(shared.demonstration().of_distillation(parser, argv) | settings))
        given = parser.parse_args(argv)
    try:
        check_distillation(given)
        _check(given)
        if caching:
            _check_caching(given)
        elif not is_demonstration(given):
            _check_job(given)
        arguments = cast(Arguments, parser.parse_dict(vars(given)))
    except (ValueError, ImportError) as error:
        raise error if isinstance(error, InputError) else InputError(str(error)) from error
    shared.hide_token(arguments[2])
    return arguments


def _settings_in(path: str) -> dict[str, object]:
    """Return the Trainer's arguments that a ds_config sets.

    They become the defaults, because both must agree.
    """
    try:
        config = read(path)[1]
    except ValueError as error:
        raise InputError(f"--deepspeed: {error}") from error
    settings = {}
    for argument, keys in _IN_DS_CONFIG.items():
        value = config
        for key in keys.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int | float):
            settings[argument] = value
    return settings


def _check(given: argparse.Namespace) -> None:
    for argument in ("teacher_load_in_4bit", "teacher_load_in_8bit"):
        if getattr(given, argument) and not is_installed("bitsandbytes"):
            raise InputError(f"--{argument} needs bitsandbytes: pip install bitsandbytes")
    for argument in ("deepspeed", "teacher_deepspeed"):
        if getattr(given, argument) is not None:
            shared.load_ds_config(argument, given)
    if given.use_peft and not is_installed("peft"):
        raise InputError("--use_peft needs PEFT: pip install peft")
    if given.use_peft and not given.model_name_or_path:
        raise InputError("--use_peft needs a trained student: give --model_name_or_path")
    for argument in ("merge_adapters", "lora_target_modules"):
        if getattr(given, argument) and not given.use_peft:
            raise InputError(f"--{argument} needs adapters: give --use_peft")
    if given.teacher_device:
        try:
            torch.empty(0, device=given.teacher_device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"--teacher_device {given.teacher_device}: {error}") from error
    if given.streaming and given.max_steps <= 0:
        raise InputError("--streaming needs --max_steps, because the data has no known length")
    least = {"max_train_tokens": 2, "max_eval_samples": 2, "teacher_steps": 1, "lora_r": 1}
    for name, smallest in least.items():
        value = getattr(given, name)
        if value is not None and value < smallest:
            raise InputError(f"--{name} is {value}: give a whole number of at least {smallest}")
    for argument in ("train_file", "validation_file", "test_file"):
        check_name(getattr(given, argument), f"--{argument}")
    names = ("tokenizer_name", "model_name_or_path", "teacher_model_name_or_path")
    for argument in names:
        shared.check_folder(argument, getattr(given, argument))
    if argument := next((name for name in names if getattr(given, name)), None):
        shared.check_tokenizer(argument, getattr(given, argument))
    shared.check_output(given)


def _check_caching(given: argparse.Namespace) -> None:
    for argument in ("teacher_model_name_or_path", "teacher_cache", "train_file"):
        if not getattr(given, argument):
            raise InputError(f"cache_teacher needs --{argument}")
    if not given.top_k:
        raise InputError(
            "cache_teacher needs --top_k: how many of the teacher's probabilities to store for "
            "each token"
        )


def _check_job(given: argparse.Namespace) -> None:
    shared.check_stages(given)
    if given.model_name_or_path and (given.student_config or given.init_student_from_teacher):
        raise InputError(
            "--model_name_or_path is a trained student: leave out --student_config and "
            "--init_student_..."
        )
    if not (given.model_name_or_path or given.student_config or given.init_student_from_teacher):
        raise InputError(
            "there is no student: give --model_name_or_path, --student_config or "
            "--init_student_from_teacher 0,2,..."
        )
    if given.init_student_from_teacher and not given.teacher_model_name_or_path:
        raise InputError("--init_student_from_teacher needs --teacher_model_name_or_path")
    if needs_teacher(given) and not (given.teacher_model_name_or_path or given.teacher_cache):
        raise InputError(
            "there is no teacher: give --teacher_model_name_or_path or --teacher_cache, or "
            "--kd_alpha 0"
        )
