"""Trains recipes on the engine and compares them with plain torch."""

from __future__ import annotations

import json
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import zero
from tests.dist.training import ds_config
from tests.hunt.models import STEPS, WAYS, Recipe, Trained, batch, recipe, tensors_of, train_plain
from tests.processes import run_on

EQUAL, REFUSED, DIFFERENT = "equal", "refused by name", "different"


@dataclass(frozen=True)
class Setting:
    """How the engine trains a recipe."""

    stage: int
    accumulation: int
    offload: bool

    def __str__(self) -> str:
        return f"stage {self.stage}, accumulation {self.accumulation}" + ", offload" * self.offload

    def config(self) -> dict:
        options: dict = {"stage": self.stage}
        if self.stage == 3:
            # The second one frees each group as soon as it is not in use.
            options |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
        if self.offload:
            options["offload_optimizer"] = {"device": "cpu"}
            if self.stage == 3:
                options["offload_param"] = {"device": "cpu"}
        return ds_config(accumulation=self.accumulation, **options) | {"watchdog_timeout": 20}


def settings_of(seed: int) -> list[Setting]:
    """Stage 0 or 1, stage 2, and stage 3 twice; accumulation and offload, which stage 0 has not, go
    round with the seed.
    """
    stages = seed // 3 % 2, 2, 3, 3
    return [
        Setting(stage, 1 + (seed + i) % 2, stage > 0 and (seed // 2 + i) % 2 == 1)
        for i, stage in enumerate(stages)
    ]


@dataclass
class Verdict:
    """What became of a recipe in a setting, as one rank saw it."""

    seed: int
    setting: str
    recipe: str
    outcome: str
    details: str = ""


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
                losses.append(WAYS[drawn.style](engine, model, backward, x, y).item())
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
    kind = torch.complex128 if expected.is_complex() else torch.float64
    found, expected = found.to(kind), expected.to(kind)
    return float((found - expected).abs().max() / max(1.0, float(expected.abs().max())))


def _judge_all(rank: int, world_size: int, tasks: Sequence[tuple[int, int]], folder: str) -> None:
    """On each rank: judge (seed, number of the setting) one after the other, and write each
    verdict to a file at once, because the next one may end the process.
    """
    for seed, number in tasks:
        drawn, setting = recipe(seed), settings_of(seed)[number]
        verdict = Verdict(seed, str(setting), str(drawn), *judge(drawn, setting, rank, world_size))
        with Path(folder, f"rank{rank}").open("a") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")
        dist.barrier()


def _read(folder: str, rank: int) -> list[Verdict]:
    path = Path(folder, f"rank{rank}")
    lines = path.read_text().splitlines() if path.exists() else []
    return [Verdict(**json.loads(line)) for line in lines]


def hunt(
    tasks: Sequence[tuple[int, int]], world_size: int, timeout: float = 300.0
) -> list[Verdict]:
    """The verdict of each task, in their order, from processes that are started as often as one of
    them ends early or hangs.
    """
    verdicts: list[Verdict] = []
    while len(verdicts) < len(tasks):
        rest = tasks[len(verdicts) :]
        with tempfile.TemporaryDirectory() as folder:
            failure = ""
            try:
                run_on(world_size, _judge_all, rest, folder, timeout=timeout)
            except (RuntimeError, TimeoutError) as error:
                failure = str(error)
            of_ranks = [_read(folder, rank) for rank in range(world_size)]
        done = min(len(found) for found in of_ranks)
        verdicts += [
            _worst(found) for found in zip(*(each[:done] for each in of_ranks), strict=True)
        ]
        if not failure:
            continue
        if done == len(rest):
            verdicts[-1].outcome, verdicts[-1].details = DIFFERENT, failure
            continue
        seed, number = rest[done]
        said = [each[done].details for each in of_ranks if len(each) > done]
        verdicts.append(
            Verdict(
                seed,
                str(settings_of(seed)[number]),
                str(recipe(seed)),
                DIFFERENT,
                f"ended or hung; other ranks: {said}\n{failure}",
            )
        )
    return verdicts


def _worst(of_ranks: Sequence[Verdict]) -> Verdict:
    order = (DIFFERENT, REFUSED, EQUAL)
    outcomes = {verdict.outcome for verdict in of_ranks}
    worst = min(of_ranks, key=lambda verdict: order.index(verdict.outcome))
    if len(outcomes) > 1:
        worst.details = "ranks: " + " | ".join(f"{v.outcome} {v.details}" for v in of_ranks)
        worst.outcome = DIFFERENT
    return worst
