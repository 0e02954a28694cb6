"""`zero verify`: a correct engine passes. Each planted fault is found and explained."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

import zero
from tests import recorded
from tests.dist.toys import toy, toy_batches
from tests.dist.training import adamw, ds_config, loss_of, one_group, split, trainable
from tests.processes import REPOSITORY, kill_tree, on_ranks, run_on
from zero.comm.communicator import Communicator
from zero.config import load_config
from zero.core.param_group import ParamGroup
from zero.core.reduction import GradientReducer
from zero.integrations.deepspeed.engine import DeepSpeedEngine
from zero.optim.sharded_optimizer import ZeroOptimizer
from zero.optim.subgroups import SubGroupInMemory
from zero.optim.update import SubGroupUpdate
from zero.tools.cli import main
from zero.tools.verify import command
from zero.tools.verify.command import DISTURBED, ENGINE, PLAIN, as_text
from zero.tools.verify.compare import Result, Tensor, compare
from zero.tools.verify.plain import PlainEngine, hold_whole_models
from zero.tools.verify.record import Recorder

RANKS, STEPS, ACCUMULATION = 2, 2, 2
DTYPES = {
    "float32": {},
    "bfloat16": {"bf16": {"enabled": True}},
    "float16": {"fp16": {"enabled": True}},
}
LOST, FROZEN, LEFT_OUT = "blocks.1.up.weight", "blocks.2", 3


collect, update_sub_group = GradientReducer.collect, SubGroupUpdate.__call__
begin_update, forward = SubGroupUpdate.__init__, DeepSpeedEngine.forward
norm_of, backward = ZeroOptimizer._global_norm, DeepSpeedEngine.backward


def drop_gradient(reducer: GradientReducer, param_group: ParamGroup, index: int) -> None:
    if param_group.param_names[index] == LOST:
        param_group.params[index].grad.zero_()
    collect(reducer, param_group, index)


def freeze(update: SubGroupUpdate, values: SubGroupInMemory) -> torch.Tensor:
    kept = values.master.clone()
    weights = update_sub_group(update, values)
    if values.sub_group.group.name == FROZEN:
        values.master.copy_(kept)
    return weights


def with_other_numbers(**numbers: Any) -> Any:
    """The update goes by these numbers in the place of the param group's."""

    def init(update: SubGroupUpdate, *args: Any, **kwargs: Any) -> None:
        begin_update(update, *args, **kwargs)
        for group in update._param_groups:
            group |= numbers

    return init


def change_group(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> torch.Tensor:
    engine.optimizer.param_groups[0]["lr"] *= 1.001
    return backward(engine, *args, **kwargs)


FAULTS: dict[str, tuple[type, str, Any]] = {
    "none": (DeepSpeedEngine, "scale", DeepSpeedEngine.scale),
    "forward": (DeepSpeedEngine, "forward", lambda self, **batch: forward(self, **batch) * 1.00001),
    "mean": (Communicator, "mean_factor", 1.0),
    "gradient": (GradientReducer, "collect", drop_gradient),
    "frozen": (SubGroupUpdate, "__call__", freeze),
    "touched": (ZeroOptimizer, "_is_idle", lambda self, sub_group: False),  # without a gradient
    "norm": (ZeroOptimizer, "_global_norm", lambda *given: 1.1 * norm_of(*given)),
    "skipped": (ZeroOptimizer, "_global_norm", lambda *given: norm_of(*given) * math.nan),
    "setting": (DeepSpeedEngine, "backward", change_group),
    "clipping": (ZeroOptimizer, "_clip_coefficient", lambda self: 1.0),
    "rate": (SubGroupUpdate, "__init__", with_other_numbers(lr=1.01e-3)),
    "betas": (SubGroupUpdate, "__init__", with_other_numbers(betas=(0.9, 0.95))),
    "decay": (SubGroupUpdate, "__init__", with_other_numbers(weight_decay=0.0)),
}


def record(
    rank: int,
    world_size: int,
    folder: Path,
    faults: list[str],
    dtype: str,
    init: dict[str, Any] | None = None,
) -> None:
    """Record the plain runs, and one run of the engine for each fault.

    The model is made in `zero.Init(**init)`.
    """
    for name in (PLAIN, DISTURBED, *faults):
        is_plain = name in (PLAIN, DISTURBED)
        config = ds_config(
            accumulation=ACCUMULATION,
            clip=0.1,
            stage3_param_persistence_threshold=0,
            **DTYPES[dtype],
        )
        settings = load_config(config)
        with mock.patch.object(zero.Init, "__init__", zero.Init.__init__):
            if is_plain:
                hold_whole_models()
            with zero.Init(**init or {}, enabled=init is not None):
                model = toy()
        model.dropped.add(LEFT_OUT)
        optimizer = adamw(one_group(trainable(model)))
        with mock.patch.object(*FAULTS.get(name, FAULTS["none"])):
            make = PlainEngine if is_plain else DeepSpeedEngine
            engine = make(model, settings, optimizer)
            Recorder(engine, folder / name, STEPS + 1, name if is_plain else ENGINE)
            for batch in toy_batches(STEPS):
                for micro in split(batch, ACCUMULATION * world_size)[rank::world_size]:
                    engine.backward(loss_of(engine(**micro)))
                    engine.step()


def found(folder: Path, faults: list[str], dtype: str) -> dict[str, Result]:
    run_on(RANKS, record, folder, faults, dtype)
    return {name: compared(folder, name) for name in faults}


def compared(folder: Path, name: str) -> Result:
    return compare(folder / name, folder / PLAIN, folder / DISTURBED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_engine_is_equal(tmp_path: Path, dtype: str):
    result = found(tmp_path, ["none"], dtype)["none"]
    assert result.difference is None, as_text(result)
    kinds = ("loss", "gradient", "setting", "norm", "exp_avg", "exp_avg_sq", "update")
    assert [(row.step, row.kind) for row in result.rows] == [
        (0, "value"), *((step, kind) for step in range(1, STEPS + 1) for kind in kinds)
    ]  # fmt: skip
    losses = [row for row in result.rows if row.kind == "loss"]
    assert [len(row.tensors) for row in losses] == [RANKS * ACCUMULATION] * STEPS


@pytest.mark.parametrize("init", [{}, {"dtype": torch.bfloat16}], ids=str)
def test_only_an_init_that_rounds_is_taken_for_one(tmp_path: Path, init: dict[str, Any]):
    run_on(RANKS, record, tmp_path, ["none"], "bfloat16", init)
    result = compared(tmp_path, "none")
    assert result.difference is None, as_text(result)


TIMES = "All tensors of this kind are {} times the plain ones"
BEFORE = "Everything compared before it"
# Of each fault: the first kind of numbers that differ, the tensor, and how the cause begins.
EXPECTED = {
    "mean": ("gradient", "stem.weight", TIMES.format(2)),
    "gradient": ("gradient", LOST, f"The engine has no gradient for {LOST}."),
    "frozen": ("update", f"{FROZEN}.norm.weight", f"The step has not changed {FROZEN}"),
    "forward": ("loss", "micro-batch 0 on rank 0", TIMES.format(1)),
}
# Its updates hardly change with the size of gradients.
HIDDEN_BY_ADAM = {
    "norm": ("norm", "all gradients", BEFORE),
    "skipped": ("setting", "whether the step was skipped", "It is 1 on the engine and 0 on plain"),
    "setting": ("setting", "lr of param group 0", "It is 0.001"),
    "clipping": ("exp_avg", "stem.weight", "All tensors of this kind are"),
    "betas": ("exp_avg_sq", "stem.weight", TIMES.format(50)),
    "rate": ("update", "stem.weight", TIMES.format(1.01)),
    "decay": ("update", None, BEFORE),
    "touched": ("update", None, BEFORE),
}


@pytest.mark.parametrize(
    ("dtype", "faults"),
    [
        ("float32", [*EXPECTED, *HIDDEN_BY_ADAM]),
        ("bfloat16", list(HIDDEN_BY_ADAM)[::2]),
        ("float16", list(HIDDEN_BY_ADAM)[1::2]),
    ],
)
def test_planted_faults_are_found_and_explained(tmp_path: Path, dtype: str, faults: list[str]):
    for name, result in found(tmp_path, faults, dtype).items():
        kind, tensor, cause = (EXPECTED | HIDDEN_BY_ADAM)[name]
        difference = result.difference
        assert difference is not None, name
        assert (difference.step, difference.kind) == (1, kind), f"{name}: {difference}"
        assert tensor in (None, difference.beyond[0].name), f"{name}: {difference}"
        assert difference.cause.startswith(cause), f"{name}: {difference}"
        assert difference.kind in as_text(result)


@pytest.mark.parametrize("make", [DeepSpeedEngine, PlainEngine])
@on_ranks(1)
def test_accelerate_sees_that_a_step_was_skipped(rank, world_size, make):
    """What accelerate reads after a step that overflowed, before it steps the schedule."""
    model, fp16 = toy(), {"enabled": True, "initial_scale_power": 32}
    engine = make(model, load_config(ds_config(fp16=fp16)), adamw(one_group(trainable(model))))
    # accelerate reads it if it is there from the beginning
    assert not engine.returned_optimizer.overflow
    engine.backward(loss_of(engine(**toy_batches(1)[0])))
    engine.step()
    assert engine.returned_optimizer.overflow


def tensor(engine: list[float], plain: list[float], disturbed: list[float]) -> Tensor:
    return Tensor.of("x", [torch.tensor(values) for values in (engine, plain, disturbed)])


def test_what_is_rounding():
    inf, nan = math.inf, math.nan
    close, usual = tensor([1.0, 2.00002], [1.0, 2.0], [1.0, 2.00001]), 1e-7
    assert not close.differs(usual) and not close.is_noise
    assert tensor([1.0, 2.001], [1.0, 2.0], [1.0, 2.00001]).differs(usual)
    # By chance a tensor does not move at all: then others say how much rounding changes.
    assert not tensor([1.000002, 0], [1.0, 0], [1.0, 0]).differs(1e-6)
    noise = tensor([1e-5, 0.0], [2e-5, 0.0], [-1e-5, 1e-5])
    assert noise.is_noise and not noise.differs(usual)
    lost = tensor([0.0, 0.0], [1.0, 1.0], [1.3, 0.8])
    assert lost.differs(usual) and not lost.is_noise
    assert not tensor([inf, 1.0], [nan, 1.0], [inf, 1.0]).differs(usual)
    assert tensor([inf, 1.0], [1.0, 1.0], [1.0, 1.0]).differs(usual)
    assert tensor([1.0, 1.0], [inf, 1.0], [inf, 1.0]).differs(usual)
    assert tensor([nan, 1.0], [1.0, 1.0], [1.0, 1.0]).differs(usual)


@pytest.fixture
def verify(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`zero verify`, with forked runs. Returns its exit code, stdout and stderr."""
    monkeypatch.setattr(command, "run", recorded.run)

    def call(*words: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["verify", *map(str, words)])
        return ended.value.code, *capsys.readouterr()

    return call


MODEL = """
import sys
import torch, zero
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
"""
SAVES = f"""{MODEL}
config["json_monitor"] = {{"enabled": True, "output_path": sys.argv[1]}}
engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(3):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(sys.argv[1])
"""
OVERFLOWS = f"""{MODEL}
engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(2):
    factor = float("nan") if step or len(sys.argv) > 1 else 1
    engine.backward(engine(torch.ones(1, 4)).sum() * factor)
    engine.step()
"""


def test_nothing_is_saved_while_a_script_is_verified(verify: Callable, tmp_path: Path):
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(SAVES)
    code, stdout, stderr = verify(script, output)
    assert code == 0, stdout + stderr
    assert "Equal within rounding for 1 step(s)." in stdout and not output.exists()


def test_a_script_without_a_step_is_refused(verify: Callable, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("print('nothing trains here')")
    code, _, stderr = verify(script)
    assert code == 2
    assert "took no optimizer step" in stderr
    assert "nothing trains here" in stderr


def test_skipped_and_missing_steps_are_named(verify: Callable, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(OVERFLOWS)
    code, stdout, stderr = verify("--steps", "3", script)
    assert code == 0, stdout + stderr
    assert "Both runs skipped 1 step(s)" in stdout
    assert "--steps 3: the script took only 2" in stderr
    code, _, stderr = verify("--steps", "3", script, "all")
    assert code == 2 and "no update was compared" in stderr


def test_a_signal_ends_the_script_too(tmp_path: Path):
    script, started = tmp_path / "script.py", tmp_path / "started"
    script.write_text(
        f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-m", "zero", "verify", script], cwd=REPOSITORY)
    try:
        deadline = time.monotonic() + 60
        while not (started.exists() and started.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        assert not psutil.pid_exists(int(started.read_text()))
    finally:
        kill_tree(process.pid)
