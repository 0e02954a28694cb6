"""Every command in README and docs does what it says: `COMMANDS` has each of them. Most run as they
are written, in a folder where the names of the pages are tiny models, data and scripts
(`scratch`). Of the others, their parsers read the options, and `COMMANDS` says why they do not run.

The pages' Python is compiled, and its imports, attributes and keyword arguments are looked up. What
a page shows of an own loop runs.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
import transformers
import yaml
from torch.distributed.run import get_args_parser

import zero
import zero.hf
import zero.tools.cli
from tests.distill import models
from tests.processes import REPOSITORY, fork_ranks, run
from translation.options import DataTrainingArguments, ModelArguments
from translation.tokenizer import scored_pieces, t5_tokenizer, train_sentencepiece
from zero.config import load_config
from zero.integrations.deepspeed.finder import FacadeModule

RUN = "runs as it is written, in the order of this table"
OWN_LOOP = "runs as it is written, on the pages' own loop"

# By a command's first words, `RUN` or why it does not run. The longest that fits counts.
COMMANDS = {
    # not of this project
    "cd zero": "a folder that git makes",
    "git clone": "the reader fills in the address",
    "python3 -m venv": "test.sh does it",
    ". .venv/bin/activate": "test.sh does it",
    "pip install": "from a package index",
    "hf download": "from a hub",
    "docker run": "needs docker",
    "FORCE_TORCHRUN=1 NPROC_PER_NODE=2 zero run llamafactory-cli": "not installed",
    "zero run axolotl": "not installed",
    "ds/bin/pip install": "from a package index",
    # continuous integration, whose steps are these
    "./demo.sh": "test_first_run.py runs what it starts",
    "./test.sh": "runs these tests",
    "ruff": "a step of .ci/run",
    "lint-imports": "a step of .ci/run",
    "pyright": "a step of .ci/run",
    "mkdocs build --strict": "a step of .ci/run",
    "pytest": "these tests",
    "python -m docs.generate": "test_docs.py compares what it writes",
    # a script of the reader's with a Trainer, and what becomes of its checkpoint
    "zero run train.py": RUN,
    "zero run torchrun --nproc_per_node 4 train.py": RUN,
    "zero inspect": RUN,
    "zero consolidate out": RUN,
    "cp out/checkpoint-500": RUN,
    "python -c": RUN,
    "zero convert": RUN,
    "zero adopt": RUN,
    "zero run torchrun --nproc_per_node 8 train.py": RUN,
    "zero report": RUN,
    "zero run torchrun --nnodes": "needs two machines",
    "zero launch": "needs several GPUs: test_launch.py starts processes",
    "zero verify": "starts three trainings: test_verify.py",
    "zero trace": "starts a training: test_trace.py",
    "zero consolidate checkpoint": "of adapters: tests/hunt/test_saves.py",
    # one with an own loop
    "python train.py": OWN_LOOP,
    "torchrun --nproc_per_node 8 train.py": OWN_LOOP,
    # a machine, and a model's size
    "zero doctor": RUN,
    "torchrun --nproc_per_node 2 -m zero doctor": RUN,
    "zero doctor --folder": "a disk of the reader's",
    "zero doctor --speeds": "takes a minute: test_doctor.py measures",
    "torchrun --nproc_per_node 8 -m zero doctor --speeds": "as above",
    "zero estimate": RUN,
    "zero plan": RUN,
    # applications
    "python run_translation.py": RUN,
    "torchrun --nproc_per_node 2 run_translation.py": "test_first_run.py runs it with fewer steps",
    "python run_distill.py": RUN,
    "torchrun --nproc_per_node 2 run_distill.py": RUN,
    "zero run torchrun --nproc_per_node 8 -m trl.scripts.sft": RUN,
    "zero run torchrun --nproc_per_node 8 -m trl": "takes a minute: test_trl.py runs the trainers",
    "zero run -m trl": "takes minutes without a GPU: test_trl.py",
    "python -m benchmarks": "benchmarks/LOG.md has their results",
}
# The names in the pages that stand for other things here.
LLAMAS = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-2-7b-hf", "Llama-3.1-8B")
T5S = ("google-t5/t5-3b", "t5-3b")
# What a page shows as "...".
REST = {
    "train.py": " --deepspeed ds_config.json",
    "run_distill.py": " --train_file train.jsonl --do_train --output_dir output/cached",
}
FEWER_RANKS = 2  # than --nproc_per_node says

TRAIN = """
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainerCallback,
    TrainingArguments,
)

def numbers():
    return [{"input_ids": [3, 4, 5, 6 + i % 4], "labels": [3, 4, 5, 6 + i % 4]} for i in range(96)]

class Later(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        state.global_step = max(state.global_step, 498)

if __name__ == "__main__":
    parser = HfArgumentParser(TrainingArguments)
    parser.add_argument("--model_name_or_path", default="Llama-3.1-8B")
    parser.set_defaults(
        output_dir="out", max_steps=502, save_steps=500, logging_steps=1, use_cpu=True,
        report_to="none",
    )
    args, rest = parser.parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained(rest.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(rest.model_name_or_path)
    trainer = Trainer(
        model, args, train_dataset=numbers(), callbacks=[Later()], processing_class=tokenizer
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    assert trainer.is_deepspeed_enabled
"""
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "json_monitor": {"enabled": True, "output_path": "output", "job_name": "run1"},
}


# What the page's own loop has before it and after its first example, and for "...".
BEFORE_THE_LOOP = """
import sys
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("Llama-3.1-8B")
dataset = [{"input_ids": torch.arange(3, 9), "labels": torch.arange(3, 9)}] * 16
"""
AFTER_THE_LOOP = """
held_out, folder = loader, "preempted"
"""
STEPS = """for batch in [batch]:
    engine.backward(engine(**batch).loss)
"""


class Command(NamedTuple):
    page: str
    text: str

    @property
    def words(self) -> list[str]:
        text = self.text
        for script, rest in REST.items():
            if script in text and "--deepspeed" not in text:
                text = text.replace(" ...", rest)
        return shlex.split(text.replace(" ...", ""), comments=True)

    @property
    def key(self) -> str | None:
        line = " ".join(self.words)
        return max((key for key in COMMANDS if line.startswith(key)), key=len, default=None)


def pages() -> list[Path]:
    """index.md is made from the README."""
    docs = [path for path in sorted((REPOSITORY / "docs").glob("*.md")) if path.stem != "index"]
    return [
        *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "configs/README.md")),
        *docs,
    ]


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    """The pages and texts of the code blocks of a language."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for block in re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            yield page.name, block


def commands() -> Iterator[Command]:
    """Of `bash` blocks, of what a `diff` adds and of what `text` shows after a prompt."""
    for kind, mark in (("bash", ""), ("diff", "+ "), ("text", "$ ")):
        for page, block in blocks(kind):
            if block.startswith("#!"):
                continue  # a script for a scheduler: test_templates.py
            lines = block.replace("\\\n", " ").splitlines()
            lines = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
            text = ""
            for line in lines:
                text += line
                if text.count('"') % 2:  # goes on in the next line
                    text += "\n"
                    continue
                yield from (Command(page, part) for part in text.split(" && ") if part.strip())
                text = ""
            assert not text, f"{page}: no end of {text}"


ALL = [command for command in commands() if command.words]


def test_the_table_has_every_command():
    assert len(ALL) > 75
    assert [command for command in ALL if command.key is None] == []
    assert {*COMMANDS} - {command.key for command in ALL} == set()


# -- what is not run


FIELDS = {
    field.name
    for kind in (ModelArguments, DataTrainingArguments, transformers.Seq2SeqTrainingArguments)
    for field in dataclasses.fields(kind)
}


def help_of(function: Any, *arguments: Any) -> str:
    with redirect_stdout(StringIO()) as text, pytest.raises(SystemExit):
        function(*arguments)
    return text.getvalue()


def known(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The options of a command and of what it starts: of launchers, modules and scripts."""
    text = get_args_parser().format_help() + " ".join(f"--{name}" for name in FIELDS)
    if "zero" in words:
        text += help_of(zero.tools.cli.main, [words[words.index("zero") + 1], "--help"])
    module = words[words.index("-m") + 1] if "-m" in words else ""
    if module.startswith("trl."):
        text += importlib.import_module(module).make_parser().format_help()
    elif module.startswith("benchmarks"):
        monkeypatch.setattr(sys, "argv", [module, "--help"])
        for imported in (module, f"{module}.__main__"):  # by another test
            monkeypatch.delitem(sys.modules, imported, raising=False)
        text += help_of(lambda: runpy.run_module(module, run_name="__main__"))
    return text


STARTS = ("zero", "torchrun", "python", "docker run")
NOT_OURS = ("python3", "python -m docs", "zero run axolotl")


def test_what_does_not_run_has_options_that_its_parsers_know(monkeypatch):
    read = [
        command for command in ALL
        if COMMANDS[command.key] not in (RUN, OWN_LOOP)
        and command.key.startswith(STARTS) and not command.key.startswith(NOT_OURS)
    ]  # fmt: skip
    assert len(read) > 20
    for command in read:
        words = command.words[command.words.index("IMAGE") if "IMAGE" in command.words else 0 :]
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        unknown = set(options).difference(re.findall(r"--[\w-]+", known(words, monkeypatch)))
        assert not unknown, f"{command.page}: {command.text}"


def test_files_of_tests_are_there():
    paths = [command.words[1] for command in ALL if command.key == "pytest"]
    assert paths and all((REPOSITORY / path).exists() for path in paths)


def test_a_file_of_arguments_has_known_ones():
    (block,) = [block for _, block in blocks("yaml")]
    assert yaml.safe_load(block).keys() <= FIELDS


# -- what is run


def write_models() -> None:
    lines = [f"The house number {i} is small, of {i * i} stones." for i in range(60)]
    tokenizer = t5_tokenizer(scored_pieces(train_sentencepiece(lines, 120, 1.0)))
    sizes = {
        "vocab_size": 128, "intermediate_size": 64, "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    llama = transformers.LlamaForCausalLM
    small, teacher = (models.causal(llama, 32, layers, seed=0, **sizes) for layers in (2, 12))
    Path("small.json").write_text(json.dumps(small.config.to_dict()))
    t5 = models.t5(32, 6, seed=0, vocabulary=len(tokenizer))
    # Any token ends a sentence. Otherwise each would have 512.
    t5.generation_config.eos_token_id = [*range(1, len(tokenizer))]
    for model, names in ((small, LLAMAS), (teacher, ["path/to/teacher"]), (t5, T5S)):
        for name in names:
            model.save_pretrained(name)
            tokenizer.save_pretrained(name)
    pairs = [
        {"text": line, "translation": {"en": line, "de": line.replace("The", "Das")}}
        for line in lines
    ]
    for name, part in (("train", pairs[:40]), ("valid", pairs[40:44]), ("test", pairs[44:48])):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    Path("path/to/data").mkdir()
    shutil.copy("train.jsonl", "path/to/data")


def start(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as its processes would run it; fewer of them, and without the launcher."""
    ranks = 0
    if any(word.startswith("trl.") for word in words):
        words = [*words, "--use_cpu"]  # the other scripts do where there is no GPU
    match words:
        case ["zero", "run", "torchrun", _, _, *script] | ["torchrun", _, _, *script]:
            check = words[words.index("torchrun") + 1 :]
            assert int(get_args_parser().parse_args(check).nproc_per_node) >= FEWER_RANKS
            ranks = FEWER_RANKS
            if words[0] == "zero":
                script = ["-m", "zero", "run", *script]
        case ["zero", *rest]:
            script = ["-m", "zero", *rest]
        case ["python", target, *_] if target != "-c":
            script = words[1:]
        case _:
            return run(
                [sys.executable if w == "python" else w for w in words], cwd=folder, timeout=200
            )
    return fork_ranks(*script, nproc=ranks, cwd=folder, timeout=200)


def prepare(key: str) -> None:
    """What a command needs beside what those above it wrote."""
    if key == "zero report":
        shutil.copytree("output/run1", "output/run2", dirs_exist_ok=True)
    if key == "zero convert" and Path("back").exists():  # of three commands a reader takes one
        Path("back").rename("dcp" if Path("deepspeed").exists() else "deepspeed")
    if key == "zero plan":
        Path("ds_config.json").unlink()
    if key == "torchrun --nproc_per_node 2 run_distill.py":
        shutil.rmtree("output/student", ignore_errors=True)
    if key == "zero adopt":  # DeepSpeed's checkpoint has the name of ours
        Path("out").rename("ours")
        Path("deepspeed").rename("out")


@pytest.fixture
def scratch(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_models()
    Path("train.py").write_text(TRAIN)
    Path("ds_config.json").write_text(json.dumps(DS_CONFIG))
    shutil.copy("ds_config.json", "ds.json")
    Path("configs").symlink_to(REPOSITORY / "configs")
    for name in ("run_translation.py", "run_distill.py"):
        Path(name).symlink_to(REPOSITORY / name)
    return tmp_path


@pytest.mark.timeout(900)
def test_what_runs_runs(scratch):
    order = list(COMMANDS)
    running = [command for command in ALL if COMMANDS[command.key] == RUN]
    running.sort(key=lambda command: order.index(command.key))
    failed = []
    for command in running:
        prepare(command.key)
        done = start(command.words, scratch)
        if done.returncode:
            failed.append(f"{command}\n{done.stdout}{done.stderr}")
    assert failed == []
    load_config("ds_config.json", allow_auto=True)  # by zero plan
    assert list(scratch.glob("model/*.safetensors"))
    assert {path.name for path in scratch.glob("**/*.html")} == {"report.html", "both.html"}


# -- Python


def test_the_pages_own_loop_runs(scratch):
    (config,) = [block for page, block in blocks("json") if page == "own-loops.md"]
    Path("ds_config.json").write_text(config)
    first, *others = [block for page, block in blocks("python") if page == "own-loops.md"]
    others = [block for block in others if "Experts" not in block]
    others += [block for _, block in blocks("python") if "SigtermWatch" in block]
    script = "\n".join([BEFORE_THE_LOOP, first, AFTER_THE_LOOP, *others])
    Path("train.py").write_text(script.replace("...\n", STEPS))
    running = [command for command in ALL if COMMANDS[command.key] == OWN_LOOP]
    assert len(running) == 2 and len(others) == 4
    for command in running:
        done = start(command.words, scratch)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert {path.name for path in scratch.glob("checkpoints/*")} > {"latest"}
        assert transformers.AutoModelForCausalLM.from_pretrained("model")
        shutil.rmtree("checkpoints")


def test_what_python_names_is_there():
    """Imports, what modules have, and keyword arguments."""
    count = 0
    for page, block in blocks("python"):
        tree = ast.parse(without_ellipses(block))
        space = {"torch": torch, "zero": zero, **vars(peft), **vars(transformers)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("deepspeed"):
                facade = FacadeModule(node.module)
                space |= {each.name: getattr(facade, each.name) for each in node.names}
            elif isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), space)
        for node in ast.walk(tree):
            where = f"{page}: {ast.unparse(node)}"
            if isinstance(node, ast.Attribute) and rooted(node) in ("torch", "zero"):
                assert resolved(node, space) is not None, where
            called = resolved(node.func, space) if isinstance(node, ast.Call) else None
            if callable(called) and not inspect.isbuiltin(called):  # those of C have no signature
                names = {keyword.arg: None for keyword in node.keywords if keyword.arg}
                inspect.signature(called).bind_partial(**names), where
                count += 1
    assert count > 30


def without_ellipses(block: str) -> str:
    """Leave out the arguments and lines that a page does not show."""
    return re.sub(r",\s*\.\.\.(?=\s*\))", "", block).replace("...\n    ", "if True:\n    ")


def rooted(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def resolved(node: ast.expr, space: dict[str, Any]) -> Any:
    """The object that an expression of names and dots is, or None."""
    if isinstance(node, ast.Attribute):
        return getattr(resolved(node.value, space), node.attr, None)
    return space.get(node.id) if isinstance(node, ast.Name) else None
