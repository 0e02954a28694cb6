"""Runs unmodified published training scripts on this engine and under DDP: do they run, and are the
numbers the same?

    python -m benchmarks.compatibility --examples FOLDER ... [--only trl/grpo] [--stages 3]
    [--launcher accelerate]

Each installed script runs with full fine-tuning and with adapters: it trains 4 steps on two CPU
processes in fp32, evaluates, saves, resumes from the checkpoint of step 2, and loads the result.
The reference is the same script under DDP. The command is `torchrun --nproc_per_node 2 -m zero run
SCRIPT ... --deepspeed FILE`, but the ranks are forks of a process that has imported transformers.
`--launcher accelerate` really calls `zero run accelerate launch`. The module `data` creates models
and data, so no hub is needed.

Prints a table and writes the rows to a JSON file, which keeps the rows of earlier runs of other
scripts or stages. The exit code is 1 if a script fails or a loss differs by more than 1e-5."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file

from benchmarks.compatibility import lightning, transformers_scripts
from benchmarks.compatibility.data import write_datasets, write_models
from benchmarks.runner import OUT, REPOSITORY, Parser, Row, show, table
from tests.processes import fork_ranks

TOLERANCE, PROCESSES, TIMEOUT, STEPS, SAVED_AT = 1e-5, 2, 300.0, 4, 2
COMMON = (
    f"--max_steps {STEPS} --logging_steps 1 --eval_strategy steps --eval_steps 2 --save_strategy "
    "steps "
    f"--save_steps {SAVED_AT} --per_device_train_batch_size 2 --per_device_eval_batch_size 2 "
    "--bf16 false "
    "--gradient_accumulation_steps 2 --learning_rate 1e-3 --report_to none --disable_tqdm true "
    "--seed 7 "
    "--ddp_backend gloo"
)
_TRL = COMMON + " --dtype float32 --model_name_or_path {data}/"
_SAMPLING = (
    "model --dataset_name {data}/prompt --num_generations 2 --max_completion_length 12 --beta 0.1"
    " --reward_funcs benchmarks.compatibility.data.vowels"
)
_TEACHER = " --teacher_model_name_or_path {data}/teacher"
_ON_POLICY = str(REPOSITORY / "benchmarks" / "compatibility" / "on_policy.py")
_LORA = "--use_peft --lora_r 4 --lora_alpha 8 --lora_target_modules all-linear"
COLUMNS = {
    **{name: name for name in ("script", "version", "stage", "launcher", "method", "result")},
    "loss": "loss",
    "loss, resumed": "resumed",
    "weights": "weights",
}


@dataclass(frozen=True)
class Script:
    """One published script.

    Attributes: package: the package that it belongs to. file: a path in the package's folder, in
    the folder of `--examples` if it begins with `examples/`, or an absolute path. arguments:
    `{data}` stands for the folder of models and data. adapters: further arguments that train
    adapters; None: it cannot. resumes: whether it takes `--resume_from_checkpoint`."""

    package: str
    file: str
    arguments: str
    adapters: str | None = _LORA
    resumes: bool = True


SCRIPTS = {
    "trl/sft": Script(
        "trl", "scripts/sft.py", _TRL + "model --dataset_name {data}/messages --max_length 64"
    ),
    "trl/dpo": Script(
        "trl", "scripts/dpo.py", _TRL + "model --dataset_name {data}/preference --max_length 64"
    ),
    "trl/reward": Script(
        "trl",
        "scripts/reward.py",
        _TRL + "reward --dataset_name {data}/preference --max_length 64",
        _LORA + " --lora_task_type SEQ_CLS",
    ),
    "trl/kto": Script(
        "trl", "scripts/kto.py", _TRL + "model --dataset_name {data}/label --max_length 64"
    ),
    "trl/grpo": Script("trl", "scripts/grpo.py", _TRL + _SAMPLING),
    "trl/rloo": Script("trl", "scripts/rloo.py", _TRL + _SAMPLING),
    "trl/distillation": Script(
        "trl",
        "scripts/distillation.py",
        _TRL + "model --dataset_name {data}/prompt --max_completion_length 12" + _TEACHER,
    ),
    "trl/gkd": Script(
        "trl",
        _ON_POLICY,
        "gkd "
        + _TRL
        + "model --dataset_name {data}/messages --max_length 64 --max_new_tokens 12"
        + _TEACHER,
    ),
    "trl/gold": Script(
        "trl",
        _ON_POLICY,
        "gold "
        + _TRL
        + "model --dataset_name {data}/messages --max_length 64 --max_completion_length 12 "
        "--lmbda 1.0" + _TEACHER,
    ),
    "sentence_transformers/fit": Script(
        "sentence_transformers",
        str(REPOSITORY / "examples" / "sentence_transformers_fit.py"),
        COMMON,
        adapters=None,
    ),
}
# Under DDP, transformers 5.23 resumes ViT from wrong weights: it does not know the names in its own
# file.
SCRIPTS |= {
    f"transformers/{name}": Script(
        "transformers",
        f"examples/pytorch/{file}",
        f"{COMMON} {arguments}",
        None,
        not file.startswith("image-"),
    )
    for name, (file, arguments) in transformers_scripts.SCRIPTS.items()
}
SCRIPTS["peft/sft"] = Script(
    "peft",
    "examples/sft/train.py",
    COMMON
    + " --model_name_or_path {data}/model --dataset_name {data}/messages --chat_template_format "
    "none"
    " --max_length 64",
    "--use_peft_lora --lora_r 4 --lora_alpha 8",
)
LIGHTNING = "lightning/fit"


def find(script: Script, examples: list[Path]) -> Path | None:
    """Return the script's file, or None if it is not installed."""
    spec = importlib.util.find_spec(script.package)
    if spec is None:
        return None
    if script.file.startswith("examples/"):
        paths = [folder / script.file.removeprefix("examples/") for folder in examples]
    else:
        paths = [Path(spec.submodule_search_locations[0], script.file)]
    return next((path for path in paths if path.exists()), None)


def command(
    script: Script,
    file: Path,
    data: Path,
    method: str,
    stage: int | None,
    out: Path,
    launcher: str = "torchrun",
) -> list[str]:
    """Return the arguments of `torchrun --nproc_per_node 2`, or of python for accelerate.

    Stage None: DDP.
    """
    line = script.arguments.format(data=data).split() + (
        script.adapters.split() if method == "LoRA" else []
    )
    line += ["--output_dir", str(out)]
    if stage is None:
        return [str(file), *line]
    if launcher == "accelerate":
        launch = ["accelerate", "launch", "--config_file", str(data / f"accelerate{stage}.json")]
        return ["-m", "zero", "run", *launch, str(file), *line]
    return ["-m", "zero", "run", str(file), *line, "--deepspeed", str(data / f"stage{stage}.json")]


def write_configurations(folder: Path) -> None:
    """Write `stageN.json`, and `accelerateN.json` for accelerate's launcher, which names the first.

    At stage 3 only parameters of at most 100 elements are persistent.
    """
    auto = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    for stage in (2, 3):
        zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 100}
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        settings = {"zero_optimization": zero, **dict.fromkeys(auto, "auto")}
        file = folder / f"stage{stage}.json"
        file.write_text(json.dumps(settings))
        plugin = {"deepspeed_config_file": str(file), "zero3_init_flag": stage == 3}
        launch = {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": plugin,
            "num_processes": PROCESSES,
        }
        launch |= {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "machine_rank": 0}
        (folder / f"accelerate{stage}.json").write_text(json.dumps(launch))


def write_inputs(folder: Path) -> Path:
    """Write models, data sets and configurations."""
    write_datasets(folder)
    write_models(folder)
    transformers_scripts.write_transformers_inputs(folder)
    write_configurations(folder)
    return folder


def train(line: list[str], out: Path) -> list[dict[str, Any]]:
    """Run the command, and return the Trainer's log.

    Raises RuntimeError with the end of a failed job's output.
    """
    if "accelerate" in line:
        return train_by_accelerate(line, out)
    on_zero = line[0] == "-m"
    imported = "transformers on zero" if on_zero else "transformers"
    env = {} if on_zero else {"ACCELERATE_USE_CPU": "true"}
    try:
        done = fork_ranks(
            *line, nproc=PROCESSES, timeout=TIMEOUT, imported=imported, env=env, cwd=out.parent
        )
    except TimeoutError as error:
        raise RuntimeError(str(error)[-4000:]) from None
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    return read_log(out)


def train_by_accelerate(line: list[str], out: Path) -> list[dict[str, Any]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, *line]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            text, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(
                f"not done after {TIMEOUT:.0f} s: {process.communicate()[0][-4000:]}"
            ) from None
    if process.returncode:
        raise RuntimeError(text[-4000:])
    return read_log(out)


def read_log(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())[
        "log_history"
    ]


def loss_difference(reference: list[dict[str, Any]], log: list[dict[str, Any]]) -> float:
    """Return the largest absolute difference of the losses of all training steps and
    evaluations.
    """
    if len(log) != len(reference):
        raise RuntimeError(
            f"{len(log)} entries in the log, and {len(reference)} in the reference's"
        )
    both = [
        (a[key], b[key])
        for a, b in zip(reference, log, strict=True)
        for key in ("loss", "eval_loss")
        if key in a
    ]
    return _largest(abs(a - b) for a, b in both)


def _largest(differences: Iterable[float]) -> float:
    """Return the maximum, or infinity if one is NaN, which `max` may skip."""
    return max(math.inf if math.isnan(each) else each for each in differences)


def weight_difference(reference: Path, out: Path) -> float:
    """Return the largest absolute difference of the saved weights. A saved model is loaded too."""
    (file,) = reference.glob("*.safetensors")
    saved, wanted = load_file(out / file.name), load_file(file)
    # At stage 3, transformers 5.23 saves BERT's LayerNorms by their names before 2019. It can load
    # both.
    legacy = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    for name in [name for name in saved if name.endswith(tuple(legacy))]:
        old = next(old for old in legacy if name.endswith(old))
        saved[name.replace(old, legacy[old])] = saved.pop(name)
    if {name: value.shape for name, value in saved.items()} != {
        name: value.shape for name, value in wanted.items()
    }:
        raise RuntimeError(f"{out / file.name}: other names or shapes than DDP's")
    if file.name == "model.safetensors":
        kind = getattr(
            transformers, json.loads((out / "config.json").read_text())["architectures"][0]
        )
        kind.from_pretrained(out)
    return _largest((saved[name] - wanted[name]).abs().max().item() for name in wanted)


def resume(line: list[str], out: Path) -> list[dict[str, Any]]:
    """Resume from the checkpoint of step 2 of `out`, in a new folder.

    Then `out` has the results of the resumed run.
    """
    start = out.with_name(out.name + "_start") / f"checkpoint-{SAVED_AT}"
    shutil.copytree(out / start.name, start)
    shutil.rmtree(out)
    return train([*line, "--resume_from_checkpoint", str(start)], out)


def measure(script: Script, line: list[str], out: Path, reference: Path) -> dict[str, Any]:
    """Return the largest differences between a command's results, straight and resumed, and the DDP
    run.
    """
    expected = read_log(reference)
    row = {
        "loss": loss_difference(expected, train(line, out)),
        "weights": weight_difference(reference, out),
    }
    if script.resumes:
        again = reference.with_name(reference.name + "_again")
        row["resumed"] = loss_difference(read_log(again), resume(line, out))
        row["weights"] = max(row["weights"], weight_difference(again, out))
    worst = max(row["loss"], row.get("resumed", 0.0))
    return {"result": "equal" if worst <= TOLERANCE else "differs", **row}


def rows_of_lightning(args: argparse.Namespace, data: Path) -> list[dict[str, Any]]:
    """Return a row for each strategy of `examples/lightning_fit.py`.

    It uses no Trainer of transformers.
    """
    if importlib.util.find_spec("lightning") is None:
        print(f"{LIGHTNING}: skipped, lightning is not installed", file=sys.stderr)
        return []
    rows, reference = [], lightning.fit("ddp", data / "lightning_ddp")
    for stage, method in ((2, "full"), (3, "full"), (3, "full, offload")):
        if stage not in args.stages:
            continue
        row = {
            "script": LIGHTNING,
            "version": f"lightning {version('lightning')}",
            "method": method,
        }
        row |= {"stage": stage, "launcher": "its own"}
        strategy = f"deepspeed_stage_{stage}" + ("_offload" if "offload" in method else "")
        try:
            found = lightning.differences(strategy, data / f"lightning_{strategy}", reference)
            equal = max(found["loss"], found["resumed"]) <= TOLERANCE
            row |= {"result": "equal" if equal else "differs", **found}
        except (RuntimeError, OSError) as error:
            row |= {"result": "fails", "error": str(error)}
        rows.append(row)
        say(row)
    return rows


def rows_of(name: str, args: argparse.Namespace, data: Path) -> list[dict[str, Any]]:
    """Return a row for each method and stage of one script."""
    script, rows = SCRIPTS[name], []
    file = find(script, args.examples)
    if file is None:
        print(
            f"{name}: skipped, {script.file} of {script.package} is not installed", file=sys.stderr
        )
        return []
    for method in ["full"] if script.adapters is None else ["full", "LoRA"]:
        reference = data / f"{name.replace('/', '_')}_{method}"
        train(command(script, file, data, method, None, reference), reference)
        if script.resumes:
            again = reference.with_name(reference.name + "_again")
            shutil.copytree(reference, again)
            resume(command(script, file, data, method, None, again), again)
        for stage in args.stages:
            row = {
                "script": name,
                "version": f"{script.package} {version(script.package)}",
                "method": method,
            }
            row |= {"stage": stage, "launcher": args.launcher}
            out = reference.with_name(f"{reference.name}_{stage}")
            line = command(script, file, data, method, stage, out, args.launcher)
            try:
                row |= measure(script, line, out, reference)
            except (RuntimeError, OSError) as error:
                row |= {"result": "fails", "error": str(error)}
            rows.append(row)
            say(row)
    return rows


def say(row: Row) -> None:
    print(*(row.get(key, "") for key in COLUMNS.values()), sep=", ", file=sys.stderr, flush=True)


def _identity(row: dict[str, Any]) -> tuple:
    return row["script"], row["method"], row["stage"], row["launcher"]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=[*SCRIPTS, LIGHTNING], metavar="SCRIPT", help="default: all"
    )
    parser.add_argument("--stages", nargs="+", type=int, choices=(2, 3), default=[2, 3])
    parser.add_argument("--launcher", choices=("torchrun", "accelerate"), default="torchrun")
    parser.add_argument(
        "--examples",
        nargs="+",
        type=Path,
        default=[],
        help="folders `examples` of the sources of TRL and transformers, for scripts that are not "
        "in the wheels",
    )
    parser.add_argument("--folder", type=Path, default=OUT / "compatibility")
    args = parser.parse_args()

    shutil.rmtree(args.folder / "runs", ignore_errors=True)
    data = write_inputs(args.folder / "runs")
    file = args.folder / "compatibility.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    for name in args.only or [*SCRIPTS, LIGHTNING]:
        fresh = rows_of_lightning(args, data) if name == LIGHTNING else rows_of(name, args, data)
        made = {_identity(row) for row in fresh}
        rows = [row for row in rows if _identity(row) not in made] + fresh
        file.write_text(json.dumps(rows, indent=2))
    print(show(table("Published scripts beside DDP", COLUMNS, rows)))
    sys.exit(0 if all(row["result"] == "equal" for row in rows) else 1)


if __name__ == "__main__":
    main()
