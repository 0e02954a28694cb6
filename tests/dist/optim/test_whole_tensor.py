"""Optimizers of whole tensors: checkpoints, offload, fragments, what moves between ranks, and how
work is spread.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils._pytree import tree_leaves

import zero
from tests.dist.checkpoint.test_checkpoint import (
    STEPS,
)
from tests.dist.core.test_engine import Measuring
from tests.dist.toys import after_each
from tests.dist.training import (
    Curve,
    assert_equal,
    curve_on,
    ds_config,
    relative,
    start,
    train_plain,
    train_zero,
)
from tests.parity.models import batches, build
from tests.parity.test_fp32 import SMALL
from tests.parity.test_whole_tensor import MAKE, SECTIONS
from tests.processes import on_ranks, run_on
from tests.tolerance import rounding
from zero.errors import UsageError
from zero.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_optimizer_state,
)
from zero.offload import tiers
from zero.optim.muon import MuonWithAdamW
from zero.optim.redistribute import GatheredForStep

BF16 = {"bf16": {"enabled": True}}
KEY = "momentum_buffer"


def in_files(folder: str | None) -> dict[str, dict]:
    """In memory without a folder."""
    return {} if folder is None else {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}


def order_of_a_step(rank: int, world_size: int, folder: str | None) -> str:
    """The letters of what happens: exchanges start, `step()` is called, masters go back."""
    happened = []
    config = ds_config(stage3_param_persistence_threshold=0, **in_files(folder))
    engine, _optimizer = start(build("llama"), config, make=MAKE["Muon"])
    train_zero(engine, batches("llama", 1))
    with (
        after_each(MuonWithAdamW, "step", lambda _: happened.append("U")),
        after_each(GatheredForStep, "start", lambda _: happened.append("s")),
        after_each(GatheredForStep, "return_masters", lambda _: happened.append("r")),
    ):
        train_zero(engine, batches("llama", 1))
    assert engine.comm.clock.waits["step", "whole tensors"] > 0
    return "".join(happened)


def test_step_is_called_once_and_offloaded_groups_are_read_while_others_are_updated(tmp_path):
    assert run_on(2, order_of_a_step, None) == ["sUr"] * 2
    first, second = run_on(2, order_of_a_step, str(tmp_path))
    assert first == second and re.fullmatch("s(sUr)+Ur", first)


# -- offload


def offloaded(
    rank: int, world_size: int, name: str, dtype: torch.dtype, folder: str, sections: dict
) -> Curve:
    """Train two steps, save, resume in a new engine, train two more.

    Small tensors may go to files too.
    """
    tiers.LEAST_BYTES_IN_A_FILE = 1
    config = ds_config(clip=0.5, accumulation=2, **SECTIONS[dtype], **SMALL, **sections)
    data, folder = batches("llama", 4), Path(folder) / str(len(sections))
    engine, _ = start(build("llama"), config, make=MAKE[name])
    train_zero(engine, data[:2])
    engine.save_checkpoint(folder)
    engine, _ = start(build("llama"), config, make=MAKE[name])
    engine.load_checkpoint(folder)
    found = train_zero(engine, data[2:])
    whole = engine.optimizer.whole
    in_file = [
        each.shard.tier.holds_in_file(value)
        for each in whole.own
        for value in tree_leaves(each.state)
        if torch.is_tensor(value) and value.numel() > 1
    ]
    assert in_file and all(in_file) == any(in_file) == bool(sections)
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "world_size"),
    [
        ("Muon", torch.bfloat16, 2),
        ("Whitened", torch.float32, 2),
        ("torch's Adafactor", torch.float32, 1),
    ],
)
def test_files_change_no_bit(name, dtype, world_size, tmp_path):
    in_memory = curve_on(world_size, offloaded, name, dtype, str(tmp_path), {})
    sections = in_files(str(tmp_path))
    if dtype == torch.float32:
        sections["offload_param"] = sections["offload_optimizer"] | {"max_in_cpu": 0}
    assert_equal(curve_on(world_size, offloaded, name, dtype, str(tmp_path), sections), in_memory)


@on_ranks(1)
def test_a_number_that_depends_on_all_gradients_cannot_be_offloaded(rank, world_size, tmp_path):
    config = ds_config(**SMALL, **in_files(str(tmp_path)))
    engine, _ = start(build("llama"), config, make=partial(Measuring, lr=0.1))
    says = "(?s)depends on which tensors this rank has.*offload_optimizer"
    with pytest.raises(UsageError, match=says):
        train_zero(engine, batches("llama", 1))
    with pytest.raises(UsageError):  # some groups were updated, others not
        engine.step()


# -- numbers in the param groups


class Counting(torch.optim.SGD):
    """Counts its steps in all kinds of places."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counts = {"steps": numpy.int64(0)}
        self.late = None
        self.log = []
        self.norm = float("nan")

    def step(self, closure=None):
        super().step(closure)
        # State of no parameter, as SPAM has it.
        self.state["total"] = self.state.get("total", 0) + 1
        self.state["of all"] = {"steps": self.state.get("of all", {}).get("steps", 0) + 1}
        self.counts["steps"] += 1
        self.late = (self.late or 0) + 1
        self.log.append(self.late)
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["pair"] = (group.get("pair", (0, 0))[0] + 1, 0)


def counting(rank: int, world_size: int, folder: str | None) -> None:
    """Take two steps with a schedule that halves the learning rate."""
    model = build("llama")
    optimizer = Counting([{"params": [param]} for param in model.parameters()], lr=1.0)
    schedule = partial(torch.optim.lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.5)
    config = ds_config(**in_files(folder))
    engine, *_ = zero.initialize(
        model=model, optimizer=optimizer, config=config, lr_scheduler=schedule
    )
    optimizer.state["total"] = 0
    log = optimizer.log
    train_zero(engine, batches("llama", 2))
    state = optimizer.state
    assert state["total"] == state["of all"]["steps"] == optimizer.counts["steps"] == 2
    assert optimizer.late == 2 and optimizer.log is log and log == [1, 2]
    for group in optimizer.param_groups:
        assert (group["k"], group["pair"], group["lr"]) == (2, (2, 0), 0.25)
    if folder is None:
        message = "'total' belongs to no parameter, so it cannot be stored"
        with pytest.raises(ValueError, match=message):
            engine.save_checkpoint("nowhere")


@pytest.mark.parametrize("files", [False, True])
def test_steps_may_be_counted_and_schedules_act(files, tmp_path):
    run_on(2, counting, str(tmp_path) if files else None)


# -- single parameters


def named(rank: int, world_size: int) -> list[str]:
    model = build("llama")
    expected = [(name, param.shape) for name, param in model.named_parameters()]
    optimizer = torch.optim.Adafactor(model.named_parameters())
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=ds_config())
    train_zero(engine, batches("llama", 1))
    (group,) = optimizer.param_groups
    params = [*zip(group["param_names"], group["params"], strict=True)]
    assert [(name, param.shape) for name, param in params] == expected
    return [name for name, param in params if optimizer.state[param]]


def test_names_and_shapes_are_the_models():
    first, second = run_on(2, named)
    assert sorted(first + second) == sorted(name for name, _ in build("llama").named_parameters())


def fragments(rank: int, world_size: int, stage: int) -> dict:
    engine, optimizer = start(build("llama"), ds_config(stage=stage, **BF16), make=MAKE["Muon"])
    train_zero(engine, batches("llama", 1))
    name, param = next((n, p) for n, p in engine.module.named_parameters() if "q_proj" in n)
    whole = optimizer.whole
    before, owns = safe_get_full_optimizer_state(param, KEY), whole.of_param[param].is_own
    with pytest.raises(UsageError, match=f"{KEY}.* of {name} is not sharded"):
        safe_get_local_optimizer_state(param, KEY)
    safe_set_full_optimizer_state(param, before + 1, KEY)
    assert torch.equal(safe_get_full_optimizer_state(param, KEY), before + 1)
    assert safe_get_full_optimizer_state(param, "exp_avg") is None
    optimizer.wait()
    return {
        "whole": [before, safe_get_full_fp32_param(param)],
        "owns": owns,
        "parts": sum(tensor.part(tensor.shard.master).numel() for tensor in whole.tensors),
        "state": len(optimizer.state_dict()["state"]),
    }


@pytest.mark.parametrize("stage", [3, 0])
def test_the_state_of_one_parameter(stage):
    first, second = run_on(2, fragments, stage)
    assert first["whole"][0].any() and all(map(torch.equal, first["whole"], second["whole"]))
    params = dict(build("llama").named_parameters()).values()
    if stage == 0:
        assert first["owns"] and second["owns"] and first["state"] == second["state"] == len(params)
    else:
        assert first["owns"] != second["owns"] and first["state"] + second["state"] == len(params)
        assert first["parts"] + second["parts"] == sum(param.numel() for param in params)


class Remembering(torch.optim.Optimizer):
    """Descends along the sum of all gradients.

    It keeps the first gradient without a copy, and reads `param.factor`.
    """

    def __init__(self, params, own_list: bool = False):
        super().__init__(params, {"lr": 1e-2})
        self.own = [*self.param_groups[0]["params"]] if own_list else None

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if "sum" in state:
                        state["sum"].add_(param.grad)
                    else:
                        state["sum"] = param.grad
                    param.sub_(group["lr"] * getattr(param, "factor", 1.0) * state["sum"])


def marked(name: str) -> torch.nn.Module:
    model = build(name)
    for param in model.parameters():
        param.factor = 0.5 if param.dim() == 1 else 2.0
    return model


def remembering(rank: int, world_size: int, stage: int) -> Curve:
    engine, _ = start(marked("llama"), ds_config(stage=stage, **SMALL), make=Remembering)
    return train_zero(engine, batches("llama", STEPS))


@pytest.mark.parametrize("stage", [0, 3])
def test_attributes_of_parameters_and_gradients_that_are_kept(stage):
    model = marked("llama")
    plain = train_plain(model, batches("llama", STEPS), make=Remembering)
    found = curve_on(2, remembering, stage).mean_losses()
    assert relative(found, plain.mean_losses()) <= rounding(torch.float32, 1000, STEPS)


@on_ranks(2)
def test_mistakes_that_would_train_nothing_are_errors(rank, world_size):
    with pytest.raises(UsageError, match="attribute 'own'.*param_groups"):
        start(build("llama"), ds_config(), make=partial(Remembering, own_list=True))
    model = build("llama")
    first, *others = model.parameters()
    optimizer = torch.optim.AdamW([first])
    engine = zero.initialize(model=model, optimizer=optimizer, config=ds_config())[0]
    optimizer.add_param_group({"params": others})
    with pytest.raises(UsageError, match="added to the optimizer after"):
        train_zero(engine, batches("llama", 1))
