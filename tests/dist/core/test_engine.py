"""The engine's interface: ways to make an engine and to step it, and what it refuses."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zero
from tests.dist.toys import WIDTH, Toy, toy, toy_batches
from tests.dist.training import (
    LR,
    WEIGHT_DECAY,
    Curve,
    adamw,
    assert_same_weights,
    curve_on,
    ds_config,
    loss_of,
    start,
    step,
    train_in_slices,
    train_zero,
)
from tests.processes import run_on
from tests.tolerance import rounding

STEPS = 4
CONFIG = ds_config(stage3_param_persistence_threshold=30)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5**number)


def make(way: str, model: Toy) -> zero.ZeroEngine:
    """Make an engine with AdamW at the learning rate `LR`, in one of several ways."""
    params = list(model.parameters())
    if way == "function":
        return zero.initialize(
            model=model, optimizer=lambda given: adamw(list(given)), config_params=CONFIG
        )[0]
    section = ds_config(
        stage3_param_persistence_threshold=30,
        optimizer={"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
    )
    if way == "section":
        return zero.initialize(model=model, config=section)[0]
    return zero.initialize(
        model=model, model_parameters=[{"params": params[::-1]}], config=section
    )[0]


def made(rank: int, world_size: int, way: str) -> Curve:
    return train_zero(make(way, toy()), toy_batches(STEPS))


def plain(rank: int, world_size: int, slices: int) -> Curve:
    return train_in_slices(toy(), toy_batches(STEPS), slices)


@pytest.mark.parametrize("way", ["function", "section", "model parameters"])
def test_ways_to_give_the_optimizer(way):
    expected = curve_on(1, plain, 2)
    found = curve_on(2, made, way)
    assert found.losses == expected.losses
    assert_same_weights(found.weights, expected.weights)


def scheduled(rank: int, world_size: int, given_as: str) -> list[float]:
    model = toy()
    optimizer = adamw([{"params": list(model.parameters())}])
    scheduler = halving if given_as == "function" else halving(optimizer)
    engine, returned, _, lr_scheduler = zero.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=CONFIG
    )
    rates = []
    for batch in toy_batches(3):
        rates.append(returned.param_groups[0]["lr"])
        step(engine, [batch])
    assert lr_scheduler.get_last_lr() == [returned.param_groups[0]["lr"]]
    return rates


@pytest.mark.parametrize("given_as", ["object", "function"])
def test_a_users_scheduler_acts_on_the_steps(given_as):
    assert run_on(2, scheduled, given_as) == [[LR, LR / 2, LR / 4]] * 2


def boundaries(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Return the steps so far after each micro-batch: as the configuration says, and by hand as
    accelerate does.
    """
    counts: tuple[list[int], list[int]] = ([], [])
    for by_hand, seen in zip((False, True), counts, strict=True):
        engine, _ = start(toy(), ds_config(accumulation=2, stage3_param_persistence_threshold=30))
        for number, batch in enumerate(toy_batches(6)):
            if by_hand:
                engine.set_gradient_accumulation_boundary(is_boundary=number in (2, 5))
            step(engine, [batch])
            seen.append(engine.global_steps)
    return counts


def test_accumulation_boundaries():
    assert run_on(2, boundaries)[0] == ([0, 1, 1, 2, 2, 3], [0, 0, 1, 1, 1, 2])


def two_engines(rank: int, world_size: int) -> tuple[list, list, int]:
    """Train a student beside a teacher that is only evaluated."""
    alone, _ = start(toy(), CONFIG)
    expected = [step(alone, [batch])[0] for batch in toy_batches(STEPS)]
    student, _ = start(toy(), CONFIG)
    torch.manual_seed(9)
    teacher, *_ = zero.initialize(model=Toy(blocks=2).requires_grad_(False).eval(), config=CONFIG)
    found, seen = [], []
    for batch in toy_batches(STEPS):
        with torch.no_grad():
            before = teacher(**batch).item()
        loss = student(**batch)
        with torch.no_grad():
            assert teacher(**batch).item() == before
        student.backward(loss)
        student.step()
        found.append(loss.item())
        seen.append(before)
    assert len(set(seen)) == STEPS and all(value == value for value in seen)
    return found, expected, student.residency.live


def test_two_engines_in_one_process():
    for found, expected, live in run_on(2, two_engines):
        assert found == expected and live == 0


def jointly(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Train two engines on one loss. Return the losses, and those of plain torch."""
    norms: list[float] = []
    models = [toy(blocks=2), toy(blocks=1)]
    engines = [start(model, CONFIG)[0] for model in models]
    references = [toy(blocks=2), toy(blocks=1)]
    optimizers = [adamw([{"params": list(model.parameters())}]) for model in references]
    expected = []
    for batch in toy_batches(3):
        loss = engines[1](x=engines[0](x=batch["x"]), y=batch["y"])
        loss.backward()
        for engine in engines:
            engine.step()
            norms.append(engine.get_global_grad_norm())
        references[1](x=references[0](x=batch["x"]), y=batch["y"]).backward()
        for model, optimizer in zip(references, optimizers, strict=True):
            expected.append(
                torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
            )
            optimizer.step()
            optimizer.zero_grad()
    return norms, expected


def test_two_engines_train_on_one_loss():
    for norms, expected in run_on(2, jointly):
        assert norms == pytest.approx(expected, rel=rounding(torch.float32, WIDTH * 3 * WIDTH))


def destroyed(rank: int, world_size: int) -> bool:
    """Whether a model keeps its values when its engine is destroyed, and can be given to another
    engine.
    """
    model = toy()
    engine, _ = start(model, CONFIG)
    step(engine, toy_batches(1))
    before = engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()
    again, _ = start(model, CONFIG)
    after = again._zero3_consolidated_16bit_state_dict()
    same = before is after is None or all(torch.equal(before[name], after[name]) for name in before)
    step(again, toy_batches(1))
    return same and again.get_global_grad_norm() > 0


def test_a_model_can_be_given_to_another_engine():
    assert run_on(2, destroyed) == [True, True]


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no ValueError"


class Measuring(torch.optim.SGD):
    """Keeps a number in its param groups that depends on the gradients, as Prodigy does."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["d"] = sum(
                float(param.grad.norm()) for param in group["params"] if param.grad is not None
            )


class Prodigy(torch.optim.SGD):
    """Has the name of an optimizer that sums over all parameters."""


def refusals(rank: int, world_size: int) -> dict[str, str]:
    model = toy()
    others = [*model.parameters(), torch.nn.Parameter(torch.ones(3))]
    found = {
        "foreign parameter": error_of(
            lambda: zero.initialize(
                model=model, optimizer=adamw([{"params": others}]), config=CONFIG
            )
        )
    }
    for kind in (torch.optim.LBFGS, Prodigy):
        plain_model = toy()
        optimizer = kind(plain_model.parameters())
        found[kind.__name__] = error_of(
            lambda model=plain_model, optimizer=optimizer: zero.initialize(
                model=model, optimizer=optimizer, config=CONFIG
            )
        )
    found["model"] = error_of(lambda: zero.initialize(config=CONFIG))
    found["config"] = error_of(lambda: zero.initialize(model=toy()))
    found["mpu"] = error_of(lambda: zero.initialize(model=toy(), mpu=object(), config=CONFIG))
    found["batch"] = error_of(
        lambda: zero.initialize(model=toy(), config=CONFIG | {"train_batch_size": 7})
    )
    engine, _ = start(toy(), CONFIG)
    found["half"], found["dtype"] = (
        error_of(engine.half),
        error_of(lambda: engine.to(torch.bfloat16)),
    )
    found["device"] = error_of(lambda: engine.to("meta"))
    found["loss"] = error_of(lambda: engine.backward(torch.ones(2)))
    assert (
        engine.to("cpu") is engine
        and engine.float() is engine
        and engine.to(torch.float32) is engine
    )
    frozen, *_ = zero.initialize(model=toy().requires_grad_(False), config=CONFIG)
    found["step"] = error_of(frozen.step)
    for told in (None, True):
        model, config = (
            toy(),
            CONFIG | {"zero_optimization": {"stage": 3, "elementwise_optimizer": told}},
        )
        engine, *_ = zero.initialize(
            model=model, optimizer=Measuring(model.parameters(), lr=0.1), config=config
        )
        engine.backward(loss_of(engine(**toy_batches(1)[0])))
        found[f"numbers of its own, {told}"] = error_of(engine.step)
    return found


def test_what_is_refused_says_what_to_do():
    expected = {
        "foreign parameter": "not the model's",
        "LBFGS": "LBFGS",
        "Prodigy": "it computes sums over all parameters, and each process has only some of them; "
        "use another one",
        "model": "model is missing",
        "config": "config is missing",
        "mpu": "mpu",
        "batch": "train_batch_size",
        "half": "configuration",
        "dtype": "torch.bfloat16",
        "device": "meta",
        "loss": "scalar tensor",
        "step": "optimizer",
        "numbers of its own, None": "that depends on which tensors this rank has (param group 0, "
        "d: ",
        "numbers of its own, True": "Measuring changes 'd' of its param group",
    }
    for found in run_on(2, refusals):
        assert found.keys() == expected.keys()
        for name, part in expected.items():
            assert part in found[name], f"{name}: {found[name]}"


def attributes(rank: int, world_size: int) -> dict[str, bool]:
    """Check the attributes that transformers and accelerate read."""
    model = toy()
    engine, optimizer = start(model, CONFIG)
    return {
        "module": engine.module is model,
        "config": engine.config is CONFIG,
        "parameters": [*engine.parameters()] == [*model.parameters()],
        "attributes of the model": engine.checkpointing is None
        and not hasattr(engine, "nothing_like_it"),
        "train and eval": not engine.eval().module.training and engine.train().module.training,
        "no norm before the first step": engine.get_global_grad_norm() is None,
        "groups": len(optimizer.param_groups) == 1 and optimizer.param_groups[0]["lr"] == LR,
        "overflow": optimizer.overflow is False,
        "parts": all(p.partition_numel() == p.ds_tensor.numel() for p in engine.parameters()),
        "state of this rank": engine.optimizer.state_dict().keys() == {"state", "param_groups"},
        "true sizes": sum(p.ds_numel for p in engine.parameters())
        == sum(p.numel() for p in toy().parameters()),
    }


def test_attributes():
    for found in run_on(2, attributes):
        assert found == dict.fromkeys(found, True)


def dropped(rank: int, world_size: int) -> tuple[int, int]:
    """Return how many threads and engines are left after engines were made, used and dropped."""
    threads = []
    for _ in range(3):
        engine = start(toy(), CONFIG)[0]
        train_zero(engine, toy_batches(1))
        engine = weakref.ref(engine)
        while engine() is not None and gc.collect():
            pass  # the Python object of a tensor may need one more collection
        threads.append(threading.active_count())
    return engine(), threads[-1] - threads[0]


def test_an_engine_goes_with_its_last_reference():
    assert run_on(2, dropped) == [(None, 0)] * 2
