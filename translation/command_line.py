"""What an application does with its command line before it imports torch and transformers, which
takes seconds: it prints help, and refuses misspelt arguments and an environment without its
packages.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import importlib.util
import logging
import os
import re
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

Value = TypeVar("Value")

CONFIG_HELP = "YAML or JSON file of arguments; those of the command line count instead"

# The arguments of transformers' Trainer that most jobs use, by purpose.
OF_THE_TRAINER = {
    "what to do": "do_train do_eval do_predict predict_with_generate",
    "folder": "output_dir resume_from_checkpoint push_to_hub",
    "length": "num_train_epochs max_steps",
    "batch": "per_device_train_batch_size gradient_accumulation_steps",
    "optimizer": "learning_rate lr_scheduler_type warmup_steps weight_decay",
    "precision": "bf16 fp16 gradient_checkpointing",
    "checkpoints": "save_strategy save_steps save_total_limit",
    "reports": "eval_strategy eval_steps logging_steps report_to seed",
}

# While these are imported, which transformers does where they are installed, they report what they
# cannot load and nobody has asked for.
_LOUD = ("bitsandbytes", "torch.utils._pytree", "torchao")


def option(default: Value, help: str, **metadata: object) -> Value:
    """Return a dataclass's field that is an argument of the command line."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


@dataclasses.dataclass(frozen=True)
class Application:
    """An application's name and arguments.

    `extra`: its extra in pyproject.toml, whose packages are `packages`. `groups`: dataclasses of
    its own arguments, by their titles in the help. `commands`: first words that it knows.
    """

    script: str
    summary: str
    example: str
    extra: str
    packages: Sequence[str]
    groups: Mapping[str, type]
    commands: Sequence[str] = ()

    def fail(self, message: str) -> NoReturn:
        """Print `message` as one line on stderr, and end this process with exit code 2."""
        from zero.errors import refuse

        refuse(f"{self.script}: error: {' '.join(message.split())}")

    def answer(self, argv: Sequence[str]) -> None:
        """End this process if nothing but an answer is asked for, or if the command line cannot
        work. Takes a fifth of a second.
        """
        if missing := [name for name in self.packages if not is_installed(name)]:
            self.fail(
                f"not installed: {', '.join(missing)}; run in the folder of {self.script}: "
                f'pip install ".[{self.extra}]"'
            )
        if {"-h", "--help"} & {*argv}:
            if os.environ.get("RANK", "0") == "0":
                print(self.help(), end="")
            sys.exit()
        known = {field.name for fields in self.groups.values() for field in own_fields(fields)}
        if of_the_trainer := trainer_arguments():
            self.refuse_unknown(argv, known | of_the_trainer | {"help_all", "config"})
        for name in _LOUD:
            logging.getLogger(name).setLevel(logging.ERROR)

    def refuse_unknown(self, argv: Sequence[str], known: Collection[str]) -> None:
        """Fail if a word of the command line is an argument that is not among `known`."""
        words = argv[1:] if argv[:1] and argv[0] in self.commands else argv
        if words and not words[0].startswith("-"):
            hint = _nearest(words[0], self.commands) or ": a value needs an argument before it"
            self.fail(f"unexpected {words[0]!r}{hint}")
        for word in words:
            # argparse takes a word with a space for a value, unless it is behind an equals sign.
            if re.match(r"--?[A-Za-z][^ =]*(=|$)", word):
                written = word.split("=")[0]
                name = written.lstrip("-").replace("-", "_")
                if name not in known and name.removeprefix("no_") not in known:
                    hint = _nearest(written, [f"--{each}" for each in known])
                    self.fail(f"unknown argument {written}{hint or '; see --help'}")

    def help(self) -> str:
        """Return the application's own arguments, and the names of the Trainer's most used."""
        usage = [f"{self.script} [--argument value ...]"]
        usage += [f"{self.script} {command} [--argument value ...]" for command in self.commands]
        parser = argparse.ArgumentParser(
            usage="\n       ".join(usage),
            description=f"{self.summary}\n\nexample:\n{self.example}\n\n"
            "Beside an argument stands its default, and after its help what it can be.",
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=30
            ),
            add_help=False,
        )
        for title, fields in self.groups.items():
            group = parser.add_argument_group(title)
            for field in own_fields(fields):
                group.add_argument(f"--{field.name}", **_shown(field))
        lines = [
            f"{purpose}:".ljust(13) + " ".join(f"--{name}" for name in names.split())
            for purpose, names in OF_THE_TRAINER.items()
        ]
        parser.add_argument_group("training (transformers' Trainer)", "\n".join(lines))
        engine = parser.add_argument_group("engine, arguments in a file, and more help")
        engine.add_argument(
            "--deepspeed", metavar="FILE", help="ds_config.json: zero shards and offloads by it"
        )
        engine.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
        engine.add_argument(
            "--help-all", action="store_true", help="list every argument, with all of the Trainer's"
        )
        return parser.format_help()


def without_tokens(words: Sequence[str]) -> list[str]:
    """Return a command line as it may be written to files: without the hub's access tokens."""
    shown, secret = [], False
    for word in words:
        name, equals, _value = word.partition("=")
        names_token = name.lstrip("-").replace("-", "_") in ("token", "hub_token")
        shown.append("<TOKEN>" if secret else f"{name}=<TOKEN>" if names_token and equals else word)
        secret = names_token and not equals
    return shown


def _nearest(word: str, candidates: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, candidates, n=1)
    return f": did you mean {near[0]}?" if near else ""


def is_installed(package: str) -> bool:
    """Whether `package` can be found. It is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # an import hook or `sys.modules` hides it
        return False


def own_fields(fields: type) -> list[dataclasses.Field]:
    """Return the fields of a dataclass, with their types in place of the types' names."""
    hints = typing.get_type_hints(fields)
    found = dataclasses.fields(fields)
    for field in found:
        field.type = hints[field.name]
    return list(found)


def _shown(field: dataclasses.Field) -> dict[str, typing.Any]:
    """Return how argparse's help shows a field."""
    shown = {"help": field.metadata["help"]}
    if field.default is False:
        return {**shown, "action": "store_true"}
    if choices := field.metadata.get("choices"):
        shown["help"] += f" ({', '.join(choices)})"
    number = {int, float} & {field.type, *typing.get_args(field.type)}
    metavar = "N" if number else "TEXT"
    return {**shown, "metavar": metavar if field.default is None else field.default}


def trainer_arguments() -> set[str]:
    """Return the names of the Trainer's arguments, from the source of transformers: to import it
    takes seconds. Empty if the source is not there.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return set()
    folder, names = Path(spec.origin).parent, set()
    try:
        for file in ("training_args.py", "training_args_seq2seq.py"):
            for node in ast.walk(ast.parse((folder / file).read_text(encoding="utf-8"))):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.add(node.target.id)
    except (OSError, SyntaxError):
        return set()
    return names
