"""What `benchmarks.scaling.rehearsal` writes down of a step is what the engine does on the
simulated accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from benchmarks.scaling.rehearsal import Op, Operations, Program, make_groups, rehearse
from tests.accelerator import device
from tests.dist.training import ds_config, start
from tests.parity.models import batches, build
from tests.processes import run_on
from zero.config import load_config
from zero.core.param_group import ParamGroup, State
from zero.core.reduction import GradientReducer

SMALL = {"stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 3000}
HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", SMALL),
    "t5, both offloaded": ("t5", SMALL | HOST),
    "t5, no reuse": ("t5", SMALL | {"stage3_max_reuse_distance": 0}),
    "llama, few live": ("llama", SMALL | {"stage3_max_live_parameters": 20000}),
    "gpt2, two micro-batches": ("gpt2", SMALL | {"accumulation": 2}),
    "llama, stage 2": ("llama", {"stage": 2}),
    "llama, stage 1, two micro-batches": ("llama", {"stage": 1, "accumulation": 2}),
}


def eager(name: str) -> nn.Module:
    """The model without fused attention, whose operations are not counted on CPUs."""
    model = build(name)
    model.set_attn_implementation("eager")
    return model


# Methods, what is written down of them, and whether after the call.
WATCHED = (
    (ParamGroup, "all_gather", "gather", True),
    (ParamGroup, "wait_for_all_gather", "use", False),
    (GradientReducer, "_start", "reduce", False),
    (GradientReducer, "end_backward", "backward ends", False),
)


def watch(program: Program, groups: list[ParamGroup]) -> None:
    """Write down what the engine does with its groups, as `RehearsedUnit` and `RehearsedReducer`
    do.
    """

    def watched(method: Callable, what: str, is_after: bool) -> Callable:
        def call(*args: Any, **kwargs: Any) -> None:
            numbers = [groups.index(each) for each in args if isinstance(each, ParamGroup)]
            if is_after:
                method(*args, **kwargs)
            program.add(what, *numbers)
            if not is_after:
                method(*args, **kwargs)

        return call

    for kind, name, what, is_after in WATCHED:
        setattr(kind, name, watched(getattr(kind, name), what, is_after))


def on_engine(rank: int, world_size: int, name: str, sections: dict[str, Any]) -> list[Op]:
    engine, _ = start(eager(name), ds_config(**sections))
    parts = [{key: value[:2].to(device.NAME) for key, value in batches(name, 1)[0].items()}]
    with Operations() as done:
        program = Program(lambda: done.total)
        watch(program, engine.groups)
        for _ in range(3):
            program.ops = []
            for part in parts * engine.settings.gradient_accumulation_steps:
                engine.backward(engine(**part).loss)
                engine.step()
            program.add("step")
            assert all(group.persistent or group.state is State.SHARDED for group in engine.groups)
    assert device.mistakes() == []
    return program.ops


def in_rehearsal(name: str, sections: dict[str, Any]) -> list[Op]:
    model, config = eager(name), load_config(ds_config(**sections))
    part = {key: value[:2] for key, value in batches(name, 1)[0].items()}
    with Operations() as done:
        groups = make_groups(model, config, 2)
        return rehearse(model, groups, config, lambda: model(**part).loss, lambda: done.total, True)


@pytest.mark.parametrize("case", CASES)
def test_collectives_and_waits_lie_between_the_same_computations(case):
    """Operations, groups and floating-point operations between them are equal, so the order is
    too.
    """
    expected = in_rehearsal(*CASES[case])
    assert {op.kind for op in expected} >= {"compute", "reduce", "backward ends", "step"}
    for found in run_on(2, on_engine, *CASES[case], simulated=True):
        assert found == expected
