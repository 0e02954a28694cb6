"""TRL's own scripts at stage 3 on two ranks, against DDP.

`python -m benchmarks.compatibility` measures all of them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from benchmarks.compatibility.__main__ import (
    SCRIPTS,
    command,
    find,
    measure,
    read_log,
    train,
    write_inputs,
)
from tests.hf.trainer_runs import TIMEOUT
from tests.processes import fork_ranks
from tests.releases import needs

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("trl"))


# For the first TRL hashes the whole model, and makes an engine for evaluation alone before it
# trains. For the second (TR-DPO) it mixes the weights of two sharded models after each step.
PRECOMPUTES = " --precompute_ref_log_probs"
FOLLOWS = " --sync_ref_model --ref_model_sync_steps 1 --ref_model_mixup_alpha 0.5"


@pytest.mark.parametrize(
    ("name", "method", "more"),
    [
        ("sft", "full", ""),
        ("sft", "LoRA", ""),
        ("reward", "full", ""),
        ("grpo", "full", ""),
        *((name, "full", "") for name in ("distillation", "gkd", "gold")),
        ("dpo", "full", PRECOMPUTES),
        ("dpo", "LoRA", PRECOMPUTES),
        ("kto", "full", PRECOMPUTES),
        ("dpo", "full", FOLLOWS),
    ],
)
def test_a_script_has_the_losses_and_weights_of_ddp(
    data: Path, name: str, method: str, more: str
) -> None:
    """Train, evaluate, save and load. GRPO generates, and has a reference model (beta 0.1). The
    students of the distillation trainers write all completions, GKD's some of them. Blocks of a
    model that is trained in full run batches in slices, beside TRL's own head.
    """
    script = SCRIPTS[f"trl/{name}"]
    script = dataclasses.replace(script, arguments=script.arguments + more, resumes=False)
    file = find(script, [])
    reference = data / f"{name}_{method}{more[:5]}"
    train(command(script, file, data, method, None, reference), reference)
    if more == PRECOMPUTES:
        # DDP's numbers are in the cache of the dataset, and the same model has the same hash.
        kind = "label" if name == "kto" else "preference"
        copied = shutil.copytree(data / kind, data / f"{kind}_{name}_{method}").name
        arguments = script.arguments.replace(f"/{kind}", f"/{copied}")
        script = dataclasses.replace(script, arguments=arguments)
    section = (
        {"activation_checkpointing": {"batch_slices": 2}} if method == "full" and not more else {}
    )
    configuration = data / "stage3.json"
    given = configuration.read_text()
    configuration.write_text(json.dumps(json.loads(given) | section))
    out = reference.with_name(f"{reference.name}_3")
    row = measure(script, command(script, file, data, method, 3, out), out, reference)
    configuration.write_text(given)
    assert row["result"] == "equal" and row["weights"] < 1e-5, row


@needs("accelerate", "1.12", "it has no sequence parallelism")
@needs("transformers", "5.6", "zero's sequence parallelism needs it")
def test_packed_sequences_that_two_ranks_share(data: Path) -> None:
    """Switched on as accelerate's launcher does, by the environment. A step has one batch on one
    process, and one on two that share it.
    """
    shared = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}
    script, logs = SCRIPTS["trl/sft"], []
    for stage, options in (
        (None, {"nproc": 1, "env": {"ACCELERATE_USE_CPU": "true"}, "imported": "transformers"}),
        (3, {"nproc": 2, "env": shared}),
    ):
        out = data / f"packed{stage}"
        line = command(script, find(script, []), data, "full", stage, out)
        line += ["--packing", "--gradient_accumulation_steps", "1"]
        done = fork_ranks(*line, timeout=TIMEOUT, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        logs.append([entry for entry in read_log(out) if "loss" in entry])
    assert len(logs[0]) == 4
    for key in ("loss", "grad_norm"):
        expected, found = ([entry[key] for entry in log] for log in logs)
        assert found == pytest.approx(expected, rel=1e-6)
