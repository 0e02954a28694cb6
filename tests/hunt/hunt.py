"""Trains recipes on the engine and compares them with plain torch."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import zero
from tests.dist.training import ds_config
from tests.hunt import TIMES
from tests.hunt.models import STEPS, Recipe, Trained, batch, recipe, run, tensors_of, train_plain
from tests.processes import run_on

EQUAL, REFUSED, DIFFERENT = "equal", "refused by name", "different"


@dataclass(frozen=True)
class Setting:
    """How the engine trains a recipe."""

    stage: int
    accumulation: int
    offload: bool
    cut: str  # "tensors", in which the optimizer sees parameters, or "sub-groups"

    def __str__(self) -> str:
        how = f"stage {self.stage}, accumulation {self.accumulation}, {self.cut}"
        return how + ", offload" * self.offload

    def config(self) -> dict:
        options: dict = {"stage": self.stage}
        if self.stage == 3:
            # The second one frees each group as soon as it is not in use.
            options |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
        if self.cut == "tensors":
            options["elementwise_optimizer"] = False
        elif self.stage == 3:
            options["sub_group_size"] = 50
        if self.offload:
            options["offload_optimizer"] = {"device": "cpu"}
            if self.stage == 3:
                options["offload_param"] = {"device": "cpu"}
        return ds_config(accumulation=self.accumulation, **options) | {"watchdog_timeout": 20}


def settings_of(seed: int) -> list[Setting]:
    """Stage 0 or 1, stage 2, and stage 3 twice; accumulation, offload, which stage 0 has not, and
    what the optimizer sees go round with the seed.
    """
    stages = seed // 3 % 2, 2, 3, 3
    return [
        Setting(
            stage,
            1 + (seed + i) % 2,
            stage > 0 and (seed // 2 + i) % 2 == 1,
            "tensors" if (seed // 4 + i) % 4 == 0 else "sub-groups",
        )
        for i, stage in enumerate(stages)
    ]


@dataclass
class Verdict:
    """What became of a recipe in a setting, as one rank saw it."""

    seed: int
    setting: str
    recipe: str
    outcome: str
    details: str


def train_zero(drawn: Recipe, setting: Setting, rank: int) -> Trained:
    model = drawn.build()
    for module in model.modules():
        if getattr(module, "needs_leaf", False):
            zero.leaf.set_z3_leaf_modules(model, [type(module)])
    optimizer = drawn.make_optimizer(model)
    engine = zero.initialize(model=model, optimizer=optimizer, config=setting.config())[0]
    losses = []

    def backward(loss: torch.Tensor, retain_graph: bool = False) -> None:
        if drawn.by_script:
            loss.backward(retain_graph=retain_graph)
        else:
            engine.backward(loss, retain_graph=retain_graph)

    try:
        for step in range(STEPS):
            model.before_step(step)
            for micro in range(setting.accumulation):
                x, y = batch(step, micro, rank)
                losses.append(run(drawn.style, backward, engine, model, x, y))
                engine.step()
            assert setting.stage < 3 or engine.residency.live == 0
        with zero.GatheredParameters(model.parameters()):
            return Trained([losses], [tensors_of(model)])
    finally:
        engine.destroy()


def judge(drawn: Recipe, setting: Setting, rank: int, world_size: int) -> tuple[str, str]:
    """The outcome, and what is different."""
    expected = train_plain(drawn, world_size, setting.accumulation)
    names = [name for name, _ in drawn.build().named_modules() if name]
    names += list(expected.tensors[rank])
    names += [type(module).__name__ for module in drawn.build().modules()]
    try:
        found = train_zero(drawn, setting, rank)
    except ValueError as error:  # UsageError is one
        says = f"{type(error).__name__}: {error}"
        return (REFUSED if any(name in says for name in names) else DIFFERENT), says
    except Exception:
        return DIFFERENT, traceback.format_exc()
    apart = {"losses": _apart(torch.tensor(found.losses[0]), torch.tensor(expected.losses[rank]))}
    for name, value in expected.tensors[rank].items():
        apart[name] = _apart(found.tensors[0][name], value)
    worst = max(apart, key=lambda name: float("inf") if apart[name] != apart[name] else apart[name])
    if apart[worst] <= drawn.tolerance:
        return EQUAL, ""
    return DIFFERENT, f"{worst} {apart[worst]:.3g} apart"


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value or to 1."""
    if not expected.numel():
        return 0.0
    found, expected = found.double(), expected.double()
    return float((found - expected).abs().max() / max(1.0, float(expected.abs().max())))


def _judge_all(rank: int, world_size: int, tasks: Sequence[tuple[int, int]]) -> list[Verdict]:
    """What is printed is in the report of a rank that ends or hangs."""
    found = []
    for seed, number in tasks:
        drawn, setting = recipe(seed), settings_of(seed)[number]
        print(f"{seed}/{number}: {drawn}; {setting}", file=sys.stderr, flush=True)
        outcome, details = judge(drawn, setting, rank, world_size)
        if outcome == DIFFERENT:
            print(details, file=sys.stderr, flush=True)
        found.append(Verdict(seed, str(setting), str(drawn), outcome, details))
        dist.barrier()
    return found


def hunt(tasks: Sequence[tuple[int, int]], world_size: int) -> list[Verdict]:
    """The verdict of each (seed, number of the setting)."""
    of_ranks = run_on(world_size, _judge_all, tasks, timeout=300.0 * TIMES)
    return [_worst(found) for found in zip(*of_ranks, strict=True)]


def _worst(of_ranks: Sequence[Verdict]) -> Verdict:
    order = (DIFFERENT, REFUSED, EQUAL)
    outcomes = {verdict.outcome for verdict in of_ranks}
    worst = min(of_ranks, key=lambda verdict: order.index(verdict.outcome))
    if len(outcomes) > 1:
        worst.details = "ranks: " + " | ".join(f"{v.outcome} {v.details}" for v in of_ranks)
        worst.outcome = DIFFERENT
    return worst
