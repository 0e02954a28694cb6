"""Measures the CPU seconds (user and system) that the commands of `zero` and the applications' help
take.

    python -m benchmarks.commands
    python -m benchmarks.commands --python min/bin/python --only estimate explain

Each command runs once to compile its modules, and then `--runs` times; the median counts. The time
on the clock is not measured, because other jobs may use the cores. The run fails if a median is
above its limit.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.runner import REPOSITORY, Parser, finish, interpreter, table
from zero.tools.arguments import count

# The whole of a small run on plain torch, which saves the checkpoint for `zero inspect`.
SAVE = """
import torch
import zero

model = torch.nn.Linear(512, 512)
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.backward(engine(torch.randn(1, 512)).sum())
engine.step()
engine.save_checkpoint("output", tag="global_step1")
"""
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
CONFIG = REPOSITORY / "configs" / "ds_config_zero3.json"


class Command(NamedTuple):
    words: str
    limit: float
    code: int = 0


COMMANDS = [
    Command("zero", 0.3),
    Command("zero --help", 0.3),
    Command("zero --version", 0.3),
    Command("zero exlpain", 0.3, code=2),
    Command("zero hook", 0.3),
    Command(f"zero explain {CONFIG}", 1.0),
    Command("zero inspect output/global_step1", 1.0),
    Command(f"zero estimate llama-8b --ds-config {CONFIG} --world 8 --batch 1 --seq 2048", 6.0),
    Command("run_translation.py --help", 4.0),
    Command("run_distill.py --help", 4.0),
]


def cpu_seconds(python: str, command: Command, folder: Path) -> float:
    """Run a command in `folder`. Returns its user and system time, with that of its children."""
    name, *rest = command.words.split()
    target = ["-m", "zero"] if name == "zero" else [str(REPOSITORY / name)]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [python, *target, *rest], cwd=folder, env=variables, stdout=log, stderr=log
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != command.code:
        sys.exit(f"{command.words}: exit code {process.returncode}\n{(folder / 'log').read_text()}")
    return usage.ru_utime + usage.ru_stime


def prepare(python: str, folder: Path) -> None:
    (folder / "llama-8b").mkdir()
    (folder / "llama-8b" / "config.json").write_text(json.dumps(LLAMA_8B))
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run([python, "-c", SAVE], cwd=folder, env=variables, check=True, capture_output=True)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--python", type=interpreter, default=sys.executable)
    parser.add_argument("--runs", type=count, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the commands to measure")
    parser.add_output()
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(args.python, folder)
        for command in COMMANDS:
            if not any(part in command.words for part in args.only):
                continue
            _, *seconds = (cpu_seconds(args.python, command, folder) for _ in range(args.runs + 1))
            words = command.words.replace(f"{REPOSITORY}{os.sep}", "")
            row = {"command": words, "limit": command.limit, "least": min(seconds)}
            rows.append(row | {"median": statistics.median(seconds)})
    columns = {name: name for name in ("median", "least", "limit", "command")}
    finish(args, table("CPU seconds of commands", columns, rows), rows=rows)
    if any(row["median"] > row["limit"] for row in rows):
        sys.exit("error: a command takes more CPU time than its limit")


if __name__ == "__main__":
    main()
