"""The applications as a user meets them first: help, a mistyped argument, packages that are not
installed. This also runs where only `pip install . pytest` was done.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from transformers import Seq2SeqTrainingArguments

import distill.options
import translation.options
from tests.processes import REPOSITORY, run, torchrun
from translation.command_line import OF_THE_TRAINER, Application, trainer_arguments

APPLICATIONS = [translation.options.APPLICATION, distill.options.APPLICATION]
EACH = pytest.mark.parametrize("application", APPLICATIONS, ids=lambda each: each.script)
# A child cannot find the packages named in HIDDEN, and prints which of the heavy ones it imported.
HIDING = """
import atexit, os, sys
from importlib.machinery import PathFinder

hidden = os.environ.get("HIDDEN", "").split()
find = PathFinder.find_spec
PathFinder.find_spec = staticmethod(
    lambda name, path=None, target=None: None if name in hidden else find(name, path, target)
)
heavy = "datasets evaluate matplotlib numpy pandas peft torch transformers trl".split()
if "SHOW_IMPORTED" in os.environ:
    atexit.register(lambda: print("imported:", *(each for each in heavy if each in sys.modules)))
"""
CORE = ["torch", "transformers", "accelerate", "safetensors", "jinja2", "xxhash"]
# They come with transformers.
OF_TRANSFORMERS = ["numpy", "tqdm", "tokenizers", "huggingface_hub", "yaml"]
# Imported only if an argument asks for them, which is refused where they are missing.
ON_REQUEST = ["peft"]


@pytest.fixture
def start(tmp_path):
    """Return a function that starts an application's command line, without some packages."""
    (tmp_path / "sitecustomize.py").write_text(HIDING)

    def start(application: Application, line: str, hidden=(), nproc: int = 0, **variables: str):
        script = REPOSITORY / application.script
        present = set(application.packages).difference(hidden)
        if any(importlib.util.find_spec(package) is None for package in present):
            pytest.skip(f"{application.extra} is not installed")
        variables |= {"PYTHONPATH": str(tmp_path), "HIDDEN": " ".join(hidden), "COLUMNS": "80"}
        if nproc:
            return torchrun(script, *line.split(), nproc=nproc, timeout=200, env=variables)
        return run([sys.executable, script, *line.split()], timeout=200, env=variables)

    return start


@EACH
def test_help_is_short_and_imports_nothing_heavy(application, start):
    process = start(application, "--help", SHOW_IMPORTED="1")
    *lines, imported = process.stdout.splitlines()
    assert (process.returncode, process.stderr, imported) == (0, "", "imported:")
    assert len(lines) <= 120 and max(map(len, lines)) <= 80
    for fields in application.groups.values():
        for field in dataclasses.fields(fields):
            assert re.search(rf"^  --{field.name}\b", process.stdout, re.MULTILINE), field.name
    assert "--help-all" in process.stdout and "example:\n  torchrun" in process.stdout


def test_the_arguments_of_the_trainer_are_found_in_its_source():
    fields = {each.name for each in dataclasses.fields(Seq2SeqTrainingArguments) if each.init}
    assert fields <= trainer_arguments()
    assert set(" ".join(OF_THE_TRAINER.values()).split()) <= fields


@pytest.mark.parametrize(
    "application, line, message",
    [
        (0, "--sorce_lang en", "unknown argument --sorce_lang: did you mean --source_lang?"),
        (0, "--max-step=5", "unknown argument --max-step: did you mean --max_steps?"),
        (0, "train.jsonl", "unexpected 'train.jsonl': a value needs an argument before it"),
        (1, "cache_techer", "unexpected 'cache_techer': did you mean cache_teacher?"),
        (1, "cache_teacher --topk 3", "unknown argument --topk: did you mean --top_k?"),
    ],
)
def test_a_mistyped_argument_is_refused_at_once(application, line, message, start):
    application = APPLICATIONS[application]
    process = start(application, line, SHOW_IMPORTED="1")
    assert process.stderr == f"{application.script}: error: {message}\n"
    assert process.returncode == 2 and "transformers" not in process.stdout


def test_arguments_that_exist_are_not_refused():
    line = "cache_teacher --max_steps -1 --top-k=3 --no_packing --no-bf16 --source_prefix".split()
    known = {"max_steps", "top_k", "packing", "bf16", "source_prefix"}
    APPLICATIONS[1].refuse_unknown([*line, "--a b"], known)


@EACH
@pytest.mark.parametrize("nproc", [0, 2])
def test_without_its_packages_one_line_says_what_to_install(application, nproc, start):
    process = start(application, "--do_train", hidden=application.packages, nproc=nproc)
    (line,) = [line for line in process.stderr.splitlines() if application.script + ":" in line]
    assert line == (
        f"{application.script}: error: not installed: {', '.join(application.packages)}; run in "
        f'the folder of {application.script}: pip install ".[{application.extra}]"'
    )
    assert "Error:" not in process.stderr.replace("ChildFailedError:", "")
    assert nproc or (process.returncode == 2 and process.stderr == f"{line}\n")


def test_an_argument_without_its_package(start, tmp_path):
    line = f"--teacher_model_name_or_path {tmp_path}/teacher --teacher_load_in_4bit"
    process = start(APPLICATIONS[1], line, hidden=["bitsandbytes"])
    said = "--teacher_load_in_4bit needs bitsandbytes: pip install bitsandbytes"
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1] == f"run_distill.py: error: {said}"


def imported_by(path: Path, seen: set[Path]) -> set[str]:
    """Return the packages of others that a file of an application imports, and all that it
    imports of the applications."""
    seen.add(path)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            top = name.split(".")[0]
            own = REPOSITORY.joinpath(*name.split(".")).with_suffix(".py")
            if top not in ("distill", "translation", "examples", "zero"):
                found.add(top)
            elif own.is_file() and top != "zero" and own not in seen:
                found |= imported_by(own, seen)
    return found - sys.stdlib_module_names


@EACH
def test_everything_that_is_imported_is_declared(application):
    extras = re.search(
        rf"^{application.extra} = \[(.*)\]", (REPOSITORY / "pyproject.toml").read_text(), re.M
    )
    declared = [Requirement(text).name for text in re.findall('"(.*?)"', extras[1])]
    assert set(application.packages) == {*declared} - {*OF_TRANSFORMERS}
    imported = imported_by(REPOSITORY / application.script, set())
    assert imported <= {*declared, *CORE, *OF_TRANSFORMERS, *ON_REQUEST}
