"""TRL's own scripts at stage 3 on two ranks, against DDP.

`python -m benchmarks.compatibility` measures all of them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.compatibility.__main__ import (
    SCRIPTS,
    Script,
    command,
    find,
    loss_difference,
    measure,
    train,
    weight_difference,
    write_inputs,
)
from tests.hf.trainer_runs import SCRIPTS as JOBS
from tests.hf.trainer_runs import TIMEOUT
from tests.processes import fork_ranks

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("trl/sft", "full"),
        ("trl/sft", "LoRA"),
        ("trl/reward", "full"),
        ("trl/grpo", "full"),
    ],
)
def test_a_script_has_the_losses_and_weights_of_ddp(data: Path, name: str, method: str) -> None:
    """Train, evaluate, save and load. GRPO generates, and has a reference model (beta 0.1). Blocks
    of a model that is trained in full run batches in slices, beside TRL's own head.
    """
    section = {"activation_checkpointing": {"batch_slices": 2}} if method == "full" else {}
    configuration = data / "stage3.json"
    given = configuration.read_text()
    configuration.write_text(json.dumps(json.loads(given) | section))
    row = compare(data, dataclasses.replace(SCRIPTS[name], resumes=False), method)
    configuration.write_text(given)
    assert row["result"] == "equal", row
    assert row["weights"] < 1e-5, row


@pytest.mark.parametrize(
    ("name", "method", "dataset"),
    [("dpo", "full", "preference"), ("dpo", "LoRA", "preference"), ("kto", "full", "label")],
)
def test_log_probabilities_of_the_reference_can_be_computed_first(
    data: Path, name: str, method: str, dataset: str
) -> None:
    """TRL hashes the whole model for it, and makes an engine for evaluation alone first."""
    script = SCRIPTS[f"trl/{name}"]
    arguments = f"{script.arguments} --precompute_ref_log_probs"
    script = dataclasses.replace(script, arguments=arguments, resumes=False)
    # DDP's numbers are in the cache of the dataset, and the same model has the same hash.
    copied = shutil.copytree(data / dataset, data / f"{dataset}_of_{name}_{method}")
    on_zero = dataclasses.replace(
        script, arguments=arguments.replace(f"/{dataset}", f"/{copied.name}")
    )
    row = compare(data, script, method, "precomputed", on_zero)
    assert row["result"] == "equal" and row["weights"] < 1e-5, row


def test_a_reference_model_follows_the_model(data: Path) -> None:
    """TR-DPO: after each step TRL mixes the weights of two sharded models."""
    script = SCRIPTS["trl/dpo"]
    follows = "--sync_ref_model --ref_model_sync_steps 1 --ref_model_mixup_alpha 0.5"
    arguments = f"{script.arguments} {follows}"
    script = dataclasses.replace(script, arguments=arguments, resumes=False)
    row = compare(data, script, "full", "follows")
    assert row["result"] == "equal" and row["weights"] < 1e-5, row


@pytest.fixture(scope="module")
def teachers(data: Path) -> dict[str, Path]:
    """The folders of what the distillation trainers do under DDP, and at stage 3 with the weights
    of student and teacher in files.
    """
    lines = {}
    for name in ("distillation", "gkd", "gold"):
        line = SCRIPTS[f"trl/{name}"].arguments.format(data=data).split()
        lines[name] = [*line[line[0] == name :], "--max_steps", "2", "--save_strategy", "no"]
    configuration = json.loads((data / "stage3.json").read_text())
    files = {"device": "nvme", "nvme_path": str(data)}
    configuration["zero_optimization"]["offload_param"] = files | {"max_in_cpu": 0}
    (data / "files.json").write_text(json.dumps(configuration))
    script, folders = JOBS / "teachers.py", {}
    for name, start, more, options in (
        ("ddp", [script], [], {"imported": "transformers", "env": {"ACCELERATE_USE_CPU": "true"}}),
        ("zero", ["-m", "zero", "run", script], ["--deepspeed", str(data / "files.json")], {}),
    ):
        folders[name] = data / name
        folders[name].mkdir()
        file = folders[name] / "lines.json"
        file.write_text(json.dumps({each: line + more for each, line in lines.items()}))
        done = fork_ranks(*start, data / name, file, nproc=2, timeout=TIMEOUT, **options)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return folders


@pytest.mark.parametrize("name", ["distillation", "gkd", "gold"])
def test_a_distillation_trainer_has_the_losses_of_ddp_and_a_sharded_teacher_in_files(
    data: Path, teachers: dict[str, Path], name: str
) -> None:
    """The students of the first and the third write all completions, GKD's some of them."""
    ranks = [
        {kind: json.loads((folder / name / f"rank{rank}.json").read_text())
         for kind, folder in teachers.items()}
        for rank in (0, 1)
    ]  # fmt: skip
    assert loss_difference(ranks[0]["ddp"]["log"], ranks[0]["zero"]["log"]) < 1e-5, ranks
    assert weight_difference(*(folder / name for folder in teachers.values())) < 1e-5
    # TRL sets the teacher's threshold to ten times its width, so biases and norms stay whole.
    weights = load_file(data / "teacher" / "model.safetensors").values()
    large = sum(weight.nbytes for weight in weights if weight.numel() > 320)
    held = [rank["zero"]["teacher"] for rank in ranks]
    assert held == [{"file": large // 2, "memory": 0}] * 2


def test_fp32_adapters_of_a_quantized_model_are_those_of_ddp(data: Path) -> None:
    pytest.importorskip("bitsandbytes")
    sft = SCRIPTS["trl/sft"]
    script = dataclasses.replace(
        sft, file=str(JOBS / "sft_fp32_adapters.py"), resumes=False,
        arguments=f"{sft.arguments} --load_in_8bit --eval_strategy no",
    )  # fmt: skip
    row = compare(data, script, "LoRA", "--load_in_8bit")
    assert row["loss"] <= 1e-6, row
    assert row["weights"] <= 1e-7, row


def compare(
    data: Path, script: Script, method: str, flag: str = "", on_zero: Script | None = None
) -> dict[str, Any]:
    """Run the script under DDP, and it or `on_zero` at stage 3, and return the differences."""
    file = find(script, [])
    reference = data / f"{file.stem}_{method}{flag}"
    train(command(script, file, data, method, None, reference), reference)
    out = reference.with_name(f"{reference.name}_3")
    script = on_zero or script
    return measure(script, command(script, file, data, method, 3, out), out, reference)
