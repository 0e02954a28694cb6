"""Damages files of every format that the commands read. Each command then says what is wrong in one
line, or does its work, and never raises something else or waits."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import zero
from tests.dist.training import ds_config
from tests.fixtures.deepspeed.make import HERE as DEEPSPEED
from tests.parity.models import build
from tests.unit.tools.test_report import first
from zero.checkpoint.models import MODEL_FILE, consolidate
from zero.tools.cli import main

SECONDS = 30  # of a command
Damage = Callable[[Path, random.Random], object]


def _flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 8))):
        # The beginning describes the rest.
        place = draw.randrange(min(len(content), draw.choice((64, 4096, 1 << 30))) or 1)
        if content:
            content[place] = draw.randrange(256)
    path.write_bytes(content)


def _link(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(draw.choice((path, path.parent, "nowhere", "/dev/null")))


def _fifo(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _values(path: Path, draw: random.Random) -> None:
    """Replace one value in a JSON file, or else some bytes."""
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return _flip(path, draw)
    places = []

    def walk(value: object) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value)  # pyright: ignore
        for key, inner in items:
            places.append((value, key))
            if isinstance(inner, (dict, list)) and inner:
                walk(inner)

    if isinstance(content, (dict, list)) and content:
        walk(content)
        within, key = draw.choice(places)
        odd = None, -1, 0, 1 << 70, 1.5, float("nan"), "", "x", [], {}, True, [[]], {"a": None}
        within[key] = draw.choice(odd)
    path.write_text(json.dumps(content))


TEXTS = b"", b"{}", b"[]", b"null", b"3", b"\xff\xfe", b"\0" * 100, b'{"a": [1, {"b": null}]}'
DAMAGES: dict[str, Damage] = {
    "cut": lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size or 1)),
    "flip": _flip,
    "repeat": lambda path, draw: path.write_bytes(path.read_bytes() * 2),
    "replace": lambda path, draw: path.write_bytes(draw.choice(TEXTS)),
    "remove": lambda path, draw: path.unlink(),
    "link": _link,
    "fifo": _fifo,
    "folder": _folder,
    "values": _values,
}
OFTEN = [*DAMAGES, "cut", "flip", "flip", "values", "values"]


Sources = dict[str, tuple[Path, list[str]]]


def sources(folder: Path) -> Sources:
    """Folders that are read, by names, with the commands that read them."""
    folder.mkdir()
    engine, *_ = zero.initialize(
        model=build("llama"), config=ds_config(optimizer={"type": "AdamW"})
    )
    ids = torch.randint(3, 97, (1, 8))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    ours = folder / "ours" / "checkpoint-1"
    engine.save_checkpoint(ours)
    consolidate(ours, ours.parent / "consolidated")
    commands = ["inspect IN", "consolidate IN OUT", "convert IN OUT --to hf"]
    found = {"ours": (ours, commands)}
    for kind in "hf", "dcp", "deepspeed":
        main(["convert", str(ours), str(folder / kind), "--to", kind])
        found[kind] = folder / kind, ["adopt IN OUT"]
    for fixture in "t5-1", "lora-3":
        shutil.copytree(DEEPSPEED / fixture, folder / fixture)
        found[fixture] = folder / fixture, ["adopt IN OUT"]
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {}}
    speeds = {"speeds": {"compute": 3.0, "network": 1.5, "source": "here"}}
    texts = {
        "explain/ds.json": config | {"train_batch_size": 8},
        "explain/of_accelerate.yaml": {"deepspeed_config": {"zero_stage": 2}},
        "report/steps.jsonl": first(),
        "estimate/ds.json": config,
        "estimate/speeds.json": speeds,
        "estimate/config.json": json.loads((folder / "hf" / "config.json").read_text()),
    }
    for name, content in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content) + "\n")
    found["explain"] = folder / "explain", ["explain IN/ds.json", "explain IN/of_accelerate.yaml"]
    found["report"] = folder / "report", ["report IN --out OUT.html"]
    command = "estimate IN --ds-config IN/ds.json --speeds IN/speeds.json --batch 1 --seq 8"
    found["estimate"] = folder / "estimate", [command]
    return found


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    def expired(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds} s")

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def fault(arguments: list[str]) -> str:
    """Run a command; what is wrong with how it ended, or an empty text."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    try:
        with limited(SECONDS), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(arguments)
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
    if code in (1, 2) and not err.getvalue().strip():
        return f"exit code {code} without a word"
    return "" if code in (0, 1, 2) else f"exit code {code}"


def judge(seed: int, sources: Sources, folder: Path) -> str:
    """Damage one file of one source, and run a command. Returns what is wrong, or ""."""
    draw = random.Random(seed)
    name = draw.choice(sorted(sources))
    source, commands = sources[name]
    command, damage = draw.choice(commands), draw.choice(OFTEN)
    place = folder / source.name
    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.copytree(source, place)
    victim = draw.choice(sorted(path for path in place.rglob("*") if path.is_file()))
    DAMAGES[damage](victim, draw)
    named = {"IN": str(place), "OUT": str(folder / "out")}
    words = [re.sub("IN|OUT", lambda found: named[found[0]], word) for word in command.split()]
    what = fault(words)
    written = folder / "out" / MODEL_FILE
    if command.startswith("consolidate") and written.exists() and not what:
        if written.read_bytes() != (source.parent / "consolidated" / MODEL_FILE).read_bytes():
            what = "other weights"
    return f"{seed}: {command} of {name}, {damage} {victim.name}: {what}" if what else ""


def judge_all(rank: int, world_size: int, folder: str, seeds: range) -> list[str]:
    place = Path(folder)
    (place / "work").mkdir()
    found = sources(place / "sources")
    return [what for seed in seeds if (what := judge(seed, found, place / "work"))]
