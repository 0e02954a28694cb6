"""Every command of `zero` works with the declared dependencies alone, and prints only its lines.

Continuous integration runs this folder in an environment made by `pip install . pytest` as well.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import run
from zero.config import load_config
from zero.config.table import table

# Nobody has to install these for zero.
OPTIONAL = "peft trl bitsandbytes torchao matplotlib deepspeed lightning".split()
# Each takes seconds to import, or a part of one.
HEAVY = ["torch", "transformers", "accelerate", "numpy", "sympy", "triton", *OPTIONAL]

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
    "json_monitor": {"enabled": True, "output_path": "records", "job_name": "run"},
}
TRAIN = """
import sys
import torch
import zero

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
for step in range(1, 4):
    torch.manual_seed(step)
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
    if "--save" in sys.argv:
        engine.save_checkpoint("output", tag=f"global_step{step}")
print("imported:", *(name for name in sys.argv if sys.modules.get(name)))
"""
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


Done = tuple[int, str, str]  # the exit code, stdout and stderr


def python(folder: Path, *words: str) -> Done:
    done = run([sys.executable, *words], timeout=250, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def zero(folder: Path, line: str) -> Done:
    return python(folder, "-m", "zero", *line.split())


# The first words of the lines that zero prints at the start of a run.
OWN = {"zero", "key", "optimizer", "all", *(row.key for row in table(load_config(CONFIG)))}


def are_of_a_run(err: str) -> bool:
    """Whether all lines on stderr are those that zero prints at the start of a run."""
    return {line.split()[0] for line in err.splitlines()} <= OWN


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script, what it has saved and recorded, and a model's configuration."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    (folder / "train.py").write_text(TRAIN)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    code, out, err = zero(folder, f"run train.py --save transformers {' '.join(OPTIONAL)}")
    assert (code, out) == (0, "imported:\n") and are_of_a_run(err), err
    return folder


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "usage: zero COMMAND"),
        ("--help", "usage: zero COMMAND"),
        ("--version", "zero 0."),
        ("hook", "startup"),
        ("explain ds.json", "AdamW"),
        ("inspect output", "Look at one: zero inspect output/global_step3"),
        ("inspect output/global_step3", "checksums verified"),
    ],
)
def test_what_needs_no_tensor_imports_nothing_that_takes_seconds(place: Path, line: str, said: str):
    watch = f"""
import sys
from zero.tools.cli import main
main(sys.argv[1:])
print("imported:", *({set(HEAVY)!r} & sys.modules.keys()))
"""
    code, out, err = python(place, "-c", watch, *line.split())
    assert (code, err) == (0, "") and said in out and out.endswith("imported:\n")


def test_importing_zero_imports_no_torch(place: Path):
    code = f"import sys, zero; print(*({set(HEAVY)!r} & sys.modules.keys()), 'Init' in dir(zero))"
    assert python(place, "-c", code) == (0, "True\n", "")


def test_a_command_prints_only_its_own_lines(place: Path):
    code, out, err = zero(place, "doctor")
    assert (code, err) == (0, "") and "0 fault(s)" in out


@pytest.mark.parametrize(
    ("line", "said", "first"),
    [
        ("consolidate output merged", "merged/model.safetensors", "consolidate:"),
        ("convert output/global_step3 --to dcp dcp", "step 3 of zero", "convert:"),
        ("convert output/global_step3 --to deepspeed ds", "step 3 of zero", "convert:"),
        ("convert output/global_step3 --to hf hf", "step 3 of zero", "convert:"),
        ("adopt ds back", "step 3 of DeepSpeed", "adopt:"),
        ("trace --step 2 train.py", "trace.json: open it", "trace:"),
        ("verify --steps 1 train.py", "Equal", "verify: on"),
        ("estimate model --ds-config ds.json --world 2 --seq 16", "26,784 parameters", "trying"),
        ("plan model --device-memory 1G --seq 16 --out made.json", "the fastest that fi", "trying"),
    ],
)
def test_a_command_shows_its_progress(place: Path, line: str, said: str, first: str):
    code, out, err = zero(place, line)
    assert code == 0 and said in out, (out, err)
    assert {each.split()[0] for each in err.split("\n") if each.strip()} <= {*first.split()}, err


def test_a_package_that_is_missing_is_named_in_one_line(place: Path):
    code, out, err = zero(place, "estimate model --ds-config ds.json --adapter 8")
    if find_spec("peft") is not None:
        assert code == 0, err
    else:
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert err.startswith("zero: ") and "pip install peft" in err


@pytest.mark.parametrize(
    "line",
    ["run -m torch.distributed.run --nproc_per_node 2", "launch --num_gpus 2 --no_local_rank"],
)
def test_ranks_print_only_their_own_lines(place: Path, line: str):
    code, out, err = zero(place, f"{line} train.py torchao peft")
    # The lines of two ranks may mix.
    assert code == 0 and "".join(out.split()) == "imported:" * 2, (out, err)
    assert are_of_a_run(err), err
