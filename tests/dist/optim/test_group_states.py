"""Optimizer state: of param groups whose state has different names, such as SGD with momentum for
matrices only, and in tensors that wrap others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import zero
from tests.dist.toys import toy, toy_batches
from tests.dist.training import (
    Curve,
    curve_on,
    ds_config,
    start,
    train_in_slices,
    train_zero,
    trainable,
)
from tests.processes import on_ranks
from zero.errors import UsageError
from zero.fragments import (
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
)
from zero.optim.whole_tensor import closed, opened

# The option that the group of matrices has, and the state that only this group has.
KINDS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "SGD": (partial(torch.optim.SGD, lr=0.01), {"momentum": 0.9}, "momentum_buffer"),
    "AdamW": (partial(torch.optim.AdamW, lr=0.01), {"amsgrad": True}, "max_exp_avg_sq"),
    "Adagrad": (partial(torch.optim.Adagrad, lr=0.01), {"lr": 0.02}, ""),
    # One tensor at a time, and with a product that it keeps as a number of its own.
    "NAdam": (partial(torch.optim.NAdam, lr=0.01, foreach=False), {"lr": 0.02}, ""),
}


def engine_of(name: str) -> zero.ZeroEngine:
    make, option, _ = KINDS[name]

    def grouping(named):
        matrices = [param for _, param in named if param.dim() > 1]
        vectors = [param for _, param in named if param.dim() <= 1]
        return [{"params": matrices} | option, {"params": vectors}]

    config = ds_config(stage3_param_persistence_threshold=0, sub_group_size=50)
    return start(toy(), config, grouping, make)[0]


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@on_ranks(3)
def test_states_of_one_group_are_read_on_all_ranks(rank, world_size, name):
    engine, key = engine_of(name), KINDS[name][2]
    weights = dict(trainable(engine.module))
    assert all(safe_get_full_optimizer_state(param, key) is None for param in weights.values())
    train_zero(engine, toy_batches(1))
    for param in weights.values():
        full = safe_get_full_optimizer_state(param, key)
        part = safe_get_local_optimizer_state(param, key)
        if len(param.ds_shape) > 1:
            assert full.shape == param.ds_shape and full.any()
            assert part.shape == param.ds_tensor.shape
        else:
            assert full is None
            assert part is None or not part.numel()  # empty: this rank has no part of the parameter


@pytest.mark.parametrize("name", KINDS)
@on_ranks(2)
def test_a_checkpoint_holds_the_states_that_each_group_has(rank, world_size, name, tmp_path):
    batches, losses = toy_batches(4), []
    for saves in (True, False):
        engine = engine_of(name)
        if saves:
            train_zero(engine, batches[:2])
            engine.save_checkpoint(tmp_path)
        else:
            engine.load_checkpoint(tmp_path)
        losses.append(train_zero(engine, batches[2:]).losses)
    assert losses[0] == losses[1]


# -- in tensors that wrap others, as torchao's 8-bit moments


STEPS, RANKS, ACCUMULATION = 3, 2, 2
SHARDED = {"stage3_param_persistence_threshold": 0}
OFFLOAD = SHARDED | {"offload_optimizer": {"device": "cpu"}}


class Coded(torch.Tensor):
    """A tensor as 16-bit integers and a scale; reading it makes an ordinary one."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Coded:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device
        )

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype):
        self.codes = codes
        self.scale = scale

    @classmethod
    def of(cls, values: torch.Tensor) -> Coded:
        scale = values.abs().max().view(1).clamp(min=1e-30) / 32767
        return cls((values / scale).round().to(torch.int16), scale.repeat(2), values.dtype)

    def values(self) -> torch.Tensor:
        return self.codes * self.scale[0]

    def __tensor_flatten__(self) -> tuple[list[str], list[torch.dtype]]:
        return ["codes", "scale"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict, context: list, size: Any, stride: Any) -> Coded:
        return cls(tensors["codes"], tensors["scale"], *context)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise NotImplementedError(f"{func} is not for coded tensors")


class CodedMomentum(torch.optim.Optimizer):
    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                before = state["momentum"].values() if state else torch.zeros_like(param)
                momentum = before * 0.9 + param.grad
                param -= group["lr"] * momentum
                state["momentum"], state["steps"] = Coded.of(momentum), state.get("steps", 0) + 1


def coded_engine(section: dict[str, Any]) -> Any:
    return start(toy(), ds_config(accumulation=ACCUMULATION, **section), make=CodedMomentum)[0]


def continued(
    rank: int, world_size: int, section: dict[str, Any], folder: str, saves: bool
) -> Curve:
    """Save in the middle of a run, or resume there. Return what follows."""
    engine = coded_engine(section)
    batches = toy_batches(2 * STEPS)
    if saves:
        train_zero(engine, batches[:STEPS])
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return train_zero(engine, batches[STEPS:])


def test_wrapped_state_trains_as_in_one_process_and_resumes(tmp_path):
    straight = curve_on(RANKS, continued, SHARDED, str(tmp_path), True)
    plain = train_in_slices(toy(), toy_batches(2 * STEPS), RANKS, ACCUMULATION, make=CodedMomentum)
    assert straight.losses == plain.losses[STEPS:]
    again = curve_on(RANKS, continued, SHARDED, str(tmp_path), False)
    assert again.losses == straight.losses
    for name, value in plain.weights.items():
        for curve in (straight, again):
            assert torch.equal(curve.weights[name], value), name
    # One process has other shapes. A code may then be rounded the other way: by 1/32767 of the
    # largest momentum.
    on_one = curve_on(1, continued, OFFLOAD, str(tmp_path), False)
    assert on_one.mean_losses() == pytest.approx(straight.mean_losses(), rel=1e-4)


@pytest.mark.parametrize("name", ["os:system", "nowhere:Coded", "torch:Tensor", "subprocess:Popen"])
def test_a_file_cannot_name_any_other_class(name: str):
    found = opened(Coded.of(torch.ones(3)))
    with pytest.raises(UsageError, match="no such class"):
        closed(found | {"wrapper of tensors": name})
