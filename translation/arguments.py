"""Command-line arguments of run_translation.py, and the checks that are possible before work
begins.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn, cast

import yaml
from safetensors import SafetensorError, safe_open
from torch import accelerator
from transformers import (
    HfArgumentParser,
    PretrainedConfig,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from transformers.hf_argparser import DataClassType
from transformers.trainer_utils import get_last_checkpoint

import zero.config
from translation.command_line import CONFIG_HELP, Application
from translation.options import APPLICATION, DataTrainingArguments, ModelArguments
from translation.records import InputError, check_name, open_records, read_pairs, required
from zero.checkpoint import find_resumable
from zero.checkpoint.folder import TRAINER_STATE, of_trainer
from zero.config import table

# How many records of a file are checked before anything is loaded.
CHECKED_RECORDS = 1000
Arguments = tuple[ModelArguments, DataTrainingArguments, Seq2SeqTrainingArguments]
_SIZES = ("model_type", "vocab_size", "hidden_size", "d_model", "num_hidden_layers", "num_layers")


class ArgumentParser(HfArgumentParser):
    """HfArgumentParser for an application, with one-line errors."""

    def __init__(self, application: Application, *dataclasses: type):
        self.application = application
        types = [DataClassType(each) for each in dataclasses]
        super().__init__(types, prog=application.script, add_help=False, allow_abbrev=False)
        self.add_argument("--help-all", action="help", help="list all arguments")
        self.add_argument("--config", metavar="FILE", help=CONFIG_HELP)

    def error(self, message: str) -> NoReturn:
        self.application.fail(message)

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        words = list(sys.argv[1:] if args is None else args)
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config")
        if path := finder.parse_known_args(words)[0].config:
            words = words_of(path) + words  # the last one counts
        self.application.refuse_unknown(words, {action.dest for action in self._actions})
        parsed, unknown = self.parse_known_args(words, namespace or argparse.Namespace())
        if unknown:
            self.error(
                f"unexpected {unknown[0]!r}: every value needs an argument before it; see --help"
            )
        vars(parsed).pop("config")  # no argument of a dataclass
        return parsed


def words_of(path: str) -> list[str]:
    """Return the arguments of a YAML or JSON file as the words of a command line.

    Raises:
        InputError: the file is not there, or holds something else.
    """
    # To YAML, the number 1e-4 is a text.
    parse = json.loads if path.endswith(".json") else yaml.safe_load
    try:
        arguments = parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"--config {path}: {error}") from error
    if not isinstance(arguments, dict):
        raise InputError(f"--config {path}: it has no arguments, such as learning_rate: 1e-4")
    words = []
    for name, value in arguments.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words.append(f"--{name}={text}")
    return words


def output_folder(args: TrainingArguments) -> str:
    """Return `--output_dir`. Without it, transformers has set a default."""
    return required(args.output_dir, "output_dir")


def checkpoint_of(args: TrainingArguments, overwrite: bool, config: PretrainedConfig) -> str | None:
    """Return the checkpoint from which to train on: the one that is named, or the last one in the
    output folder, unless it may be overwritten. `config`: of the model that is trained.

    Raises:
        InputError: the checkpoint is of another model.
    """
    found = args.resume_from_checkpoint
    if not (found or overwrite):
        found = _last_checkpoint(args.output_dir, args.deepspeed)
    file = Path(found or "", "config.json")
    if found and file.is_file():  # a checkpoint of adapters has none
        saved, ours = json.loads(file.read_text(encoding="utf-8")), config.to_dict()
        for key in _SIZES:
            if key in saved and saved[key] != ours.get(key, saved[key]):
                raise InputError(
                    f"{found} is a checkpoint of another model ({key} is {saved[key]}, and here "
                    f"{ours[key]}): name another --output_dir, or give --overwrite_output_dir"
                )
    return found


def _last_checkpoint(folder: str | None, engine: object) -> str | None:
    """Return the newest whole checkpoint in a folder. `engine`: its configuration, if there is one.
    Without one, a checkpoint is whole if it has what the Trainer writes last.
    """
    if not folder or not os.path.isdir(folder):
        return None
    whole = (each for each in of_trainer(Path(folder)) if (each / TRAINER_STATE).is_file())
    found = find_resumable(folder) if engine else next(whole, None)
    return None if found is None else str(found)


def is_demonstration(model_args, data_args) -> bool:
    """Whether neither a model nor data is named.

    Takes the two dataclasses, or one argparse namespace twice.
    """
    return is_from_scratch(model_args) and uses_built_in_corpus(data_args)


def is_from_scratch(model_args) -> bool:
    """Whether neither a model nor a configuration is named. Then a small T5 is made."""
    return not (model_args.model_name_or_path or model_args.config_name)


def uses_built_in_corpus(data_args) -> bool:
    """Whether no data is named."""
    return not any(
        getattr(data_args, name)
        for name in ("dataset_name", "train_file", "validation_file", "test_file")
    )


def parse_arguments(argv: Sequence[str] | None = None) -> Arguments:
    """Parse and check the command line. Training arguments are created last, because they may start
    the process group.

    Raises:
        InputError: a value, file, folder or configuration cannot work. The message names it and the
        remedy.
    """
    parser = ArgumentParser(
        APPLICATION, ModelArguments, DataTrainingArguments, Seq2SeqTrainingArguments
    )
    parser.set_defaults(predict_with_generate=True, use_cpu=not accelerator.is_available())
    given = parser.parse_args(argv)
    if is_demonstration(given, given):
        parser.set_defaults(**demonstration().of_translation(given))
        given = parser.parse_args(argv)
    if uses_built_in_corpus(given):
        given.source_lang = given.source_lang or "en"
        given.target_lang = given.target_lang or "de"
    given.val_max_target_length = given.val_max_target_length or given.max_target_length
    given.generation_max_length = given.generation_max_length or given.val_max_target_length
    given.generation_num_beams = given.num_beams or given.generation_num_beams
    check_arguments(given)
    try:
        arguments = cast(Arguments, parser.parse_dict(vars(given)))
    except (ValueError, ImportError) as error:
        raise InputError(str(error)) from error
    hide_token(arguments[2])
    return arguments


def hide_token(args: TrainingArguments) -> None:
    """Move the hub's access token to where huggingface_hub looks for one: the Trainer saves its
    arguments beside the model, and uploads them.
    """
    if args.hub_token:
        os.environ["HF_TOKEN"] = args.hub_token
        args.hub_token = None


def demonstration() -> ModuleType:
    """Return the defaults of the demonstrations, which are a part of the checkout alone."""
    try:
        from examples.demonstration import defaults
    except ImportError as error:
        raise InputError(
            f"the demonstration cannot be started ({error}): give your own data and models, or run "
            "the script in a checkout"
        ) from error
    return defaults


def check_arguments(given: argparse.Namespace) -> None:
    """Check everything that needs no process group, so that each rank finds the same fault."""
    if given.deepspeed is not None:
        _check_optimizer(given, load_ds_config("deepspeed", given))
    check_stages(given, has_data=bool(given.dataset_name) or uses_built_in_corpus(given))
    if is_from_scratch(given) and not given.do_train:
        raise InputError(
            "an untrained model cannot be evaluated: give --model_name_or_path or --do_train"
        )
    _check_numbers(given)
    _check_data(given)
    for argument in ("model_name_or_path", "config_name", "tokenizer_name"):
        check_folder(argument, getattr(given, argument))
    source = next(
        (a for a in ("tokenizer_name", "model_name_or_path", "config_name") if getattr(given, a)),
        None,
    )
    if source:
        check_tokenizer(source, getattr(given, source))
    check_output(given)


def check_stages(given: argparse.Namespace, has_data: bool = False) -> None:
    """Check that there is something to do, and a file for it unless the data is named otherwise."""
    stages = {"do_train": "train_file", "do_eval": "validation_file", "do_predict": "test_file"}
    wanted = [stage for stage in stages if getattr(given, stage)]
    if not wanted:
        raise InputError(
            "nothing to do: give at least one of --do_train, --do_eval and --do_predict"
        )
    for stage in wanted:
        if not has_data and not getattr(given, stages[stage]):
            raise InputError(f"--{stage} needs data: give --{stages[stage]}")


def check_output(given: argparse.Namespace) -> None:
    """Check the folder of the results, and the run in it that is to be resumed."""
    check_resume(given)
    check_not_finished(given)
    check_output_dir(given.output_dir)
    _check_output_is_new(given)


def load_ds_config(argument: str, given: argparse.Namespace) -> zero.config.Config:
    """The configuration that `--argument` names.

    For `--deepspeed` the batch sizes must multiply out.
    """
    try:
        config = zero.config.load_config(getattr(given, argument), allow_auto=True)
        if argument == "deepspeed":
            # The Trainer will replace "auto" with its own values. Check their product now.
            batch, steps = given.per_device_train_batch_size, given.gradient_accumulation_steps
            sizes = {
                "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu or batch,
                "gradient_accumulation_steps": config.gradient_accumulation_steps or steps,
            }
            config = config.model_copy(update=sizes)
            config = config.resolve(int(os.environ.get("WORLD_SIZE", "1")))
    except (ValueError, OSError) as error:
        raise InputError(f"--{argument}: {error}") from error
    return config


def _check_optimizer(given: argparse.Namespace, config: zero.config.Config) -> None:
    if (
        config.optimizer is not None
        and given.optim != Seq2SeqTrainingArguments.__dataclass_fields__["optim"].default
    ):
        # The Trainer would silently use the configured optimizer.
        raise InputError(
            f"--optim {getattr(given.optim, 'value', given.optim)}: {given.deepspeed} has a "
            "section optimizer "
            f"({config.optimizer.type}): delete one of the two"
        )


def _check_numbers(given: argparse.Namespace) -> None:
    names = (
        "max_source_length max_target_length val_max_target_length max_train_samples "
        "max_eval_samples"
    )
    for name in (*names.split(), "max_predict_samples", "preprocessing_num_workers", "num_beams"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise InputError(
                f"--{name} is {value}: give a whole number of at least 1, or leave it out"
            )


def _check_data(given: argparse.Namespace) -> None:
    if given.source_lang and given.source_lang == given.target_lang:
        raise InputError(
            f"--source_lang and --target_lang are both {given.source_lang!r}: name two languages"
        )
    if uses_built_in_corpus(given):
        return
    for argument in ("source_lang", "target_lang"):
        if not getattr(given, argument):
            raise InputError(
                f"--{argument} is missing: name the language, as it is called in the data (for "
                "instance en)"
            )
    languages = {"source": given.source_lang, "target": given.target_lang}
    for argument in ("train_file", "validation_file", "test_file"):
        check_name(path := getattr(given, argument), f"--{argument}")
        if path and os.path.isfile(path):
            for _ in read_pairs(open_records(path, f"--{argument}"), languages, CHECKED_RECORDS):
                pass


def check_folder(argument: str, name: str | None) -> None:
    """Check that a local folder holds a model, configuration or tokenizer.

    Other names belong to the hub.
    """
    if not name:
        return
    if not os.path.isdir(name):
        if (
            os.path.isabs(name)
            or name.startswith(".")
            or name.count("/") > 1
            or os.path.exists(name)
        ):
            raise InputError(f"--{argument} {name}: no such folder")
        return
    files = os.listdir(name)
    if argument != "tokenizer_name" and "config.json" not in files:
        raise InputError(
            f"--{argument} {name}: there is no config.json in this folder; name one that holds a "
            "saved model"
        )
    if argument.endswith("model_name_or_path") and not any(
        file.endswith((".safetensors", ".bin")) for file in files
    ):
        raise InputError(
            f"--{argument} {name}: there are no weights (model.safetensors) in this folder; to "
            "train this configuration from scratch, name it with --config_name (run_distill.py: "
            "--student_config)"
        )
    if argument.endswith("model_name_or_path"):
        _check_weights(argument, name)


def _check_weights(argument: str, name: str) -> None:
    """Check that the safetensors files of a local model are complete.

    Only their headers are read.
    """
    for path in Path(name).glob("*.safetensors"):
        try:
            safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"--{argument} {name}: {path.name} is damaged or truncated ({error}); copy it again"
            ) from error


# One of these must be there. Otherwise transformers creates a tokenizer with an empty vocabulary.
_TOKENIZER_FILES = {
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "source.spm", "vocab.json", "vocab.txt",
}  # fmt: skip


def check_tokenizer(argument: str, name: str) -> None:
    """Check that a local folder holds a tokenizer."""
    if os.path.isdir(name) and not _TOKENIZER_FILES & set(os.listdir(name)):
        raise InputError(
            f"--{argument} {name}: there is no tokenizer.json in this folder; name one with "
            "--tokenizer_name"
        )


def check_resume(given: argparse.Namespace) -> None:
    """Check that the checkpoint to resume from exists. "True" becomes the last one in the output
    folder.
    """
    name = given.resume_from_checkpoint
    if name is None:
        return
    if str(name).lower() == "true":
        given.resume_from_checkpoint = _last_checkpoint(given.output_dir, given.deepspeed)
        if given.resume_from_checkpoint is None:
            raise InputError(
                f"--resume_from_checkpoint {name}: there is no whole checkpoint in "
                f"{given.output_dir}"
            )
    elif not os.path.isfile(os.path.join(name, "trainer_state.json")):
        raise InputError(
            f"--resume_from_checkpoint {name}: there is no trainer_state.json; name a folder such "
            "as out/checkpoint-500"
        )


def check_output_dir(folder: str | None) -> None:
    """Check that this folder can be created and written to. Nothing is left behind."""
    if folder is None:
        return
    if not folder or os.path.isfile(folder):
        raise InputError(f"--output_dir {folder!r} is no folder: name one")
    try:
        parent = Path(folder).absolute()
        while not _is_there(parent):
            parent = parent.parent
        # `os.access` does not help: for root it always says yes.
        os.rmdir(tempfile.mkdtemp(dir=parent))
    except (OSError, ValueError) as error:
        raise InputError(
            f"--output_dir {folder}: this folder cannot be created or written to ({error})"
        ) from error


def _is_there(path: Path) -> bool:
    try:
        return bool(os.stat(path))
    except FileNotFoundError:
        return False


def check_not_finished(given: argparse.Namespace) -> None:
    """Check that the run to resume has not ended: the Trainer would train one more step, and write
    the model again.
    """
    resumed, output = given.resume_from_checkpoint, given.output_dir
    begins_anew = given.overwrite_output_dir and not resumed
    if not given.do_train or begins_anew:
        return
    is_elsewhere = resumed and Path(resumed).absolute().parent != Path(output or "").absolute()
    # The last file of a run.
    if not is_elsewhere and not Path(output or "", "trainer_state.json").is_file():
        return
    folder = resumed or output
    try:
        state = json.loads(Path(folder, "trainer_state.json").read_text(encoding="utf-8"))
        step, epoch = state["global_step"], state["epoch"] or 0
    except (OSError, ValueError, LookupError, TypeError):
        return  # whoever reads the checkpoint tells what is wrong with it
    most_steps = given.max_steps or -1
    ends = step >= most_steps if most_steps > 0 else epoch >= (given.num_train_epochs or math.inf)
    if ends:
        raise InputError(
            f"{folder}: this run has ended after {step} steps ({epoch:g} epochs): give more "
            "--num_train_epochs or --max_steps to train on, --overwrite_output_dir to train anew, "
            "or evaluate the model without --do_train"
        )


def _check_output_is_new(given: argparse.Namespace) -> None:
    folder = given.output_dir
    if not given.do_train or given.overwrite_output_dir or given.resume_from_checkpoint:
        return
    if not folder or not os.path.isdir(folder) or get_last_checkpoint(folder) is not None:
        return
    # Files of a run that ended before its first checkpoint do not count.
    left = [
        name
        for name in os.listdir(folder)
        if not name.startswith((".zero", "incomplete-checkpoint-"))
    ]
    if set(left) - {table.FILE}:
        raise InputError(
            f"--output_dir {folder} has files in it and no checkpoint to resume from: name another "
            "folder, or give --overwrite_output_dir to train into this one"
        )
