"""Values of sharded parameters between two passes: read by GatheredParameters, else an error."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import zero
from tests.dist.toys import toy, toy_batches
from tests.dist.training import ds_config, loss_of, sgd_engine, start, step, weights_of
from tests.processes import run_on
from zero.errors import UsageError

CONFIG = ds_config(stage3_param_persistence_threshold=30)


def engine_after_a_step() -> zero.ZeroEngine:
    engine, _ = start(toy(), CONFIG)
    step(engine, toy_batches(1))
    return engine


def reads(rank: int, world_size: int) -> None:
    model = engine_after_a_step().module
    weight, state = model.head.weight, model.state_dict()
    file = io.BytesIO()
    for read in (
        lambda: {name: param.clone() for name, param in model.named_parameters()},
        lambda: [param.detach().clone() for param in model.parameters()],
        lambda: [param.norm() for param in model.parameters()],
        lambda: [param.data.float().norm() for param in model.parameters()],
        lambda: {name: value.cpu().contiguous() for name, value in state.items()},
        lambda: copy.deepcopy(state),
        lambda: weight.tolist(),
        lambda: weight[0, 0].item(),
        lambda: weight.detach().cpu().numpy(),
        lambda: float(weight.data[0, 0]),
        lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
        lambda: torch.equal(weight, weight),
        lambda: torch.ones(1) * weight.sum(),
    ):
        with pytest.raises(UsageError, match=r"would read the values of parameter '.*Gathered"):
            read()
    with pytest.raises(UsageError, match="would read the values .*save_16bit_model"):
        torch.save(state, file)
    for value in (weight, weight.data):
        with pytest.raises(UsageError, match="would read the values of parameter .*head.weight"):
            pickle.dumps(value)
    for write in (
        lambda: setattr(weight, "data", torch.zeros_like(weight)),
        lambda: model.half(),
    ):
        with pytest.raises(UsageError, match=r"parameter '.*modifier_rank=0"):
            write()


def test_reading_is_an_error_that_names_parameter_and_remedy():
    run_on(2, reads)


def looks(rank: int, world_size: int) -> None:
    """What libraries do in passing: shapes, dtypes, devices, keys, moves that change nothing."""
    engine = engine_after_a_step()
    model, plain = engine.module, toy()
    for (name, value), expected in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert value.shape == expected.shape and value.dtype == expected.dtype, name
        assert value.device == expected.device and value.nbytes == expected.nbytes, name
        assert value.view(-1).shape == expected.view(-1).shape, name
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.data.shape == param.detach().t().t().shape == expected.shape
        assert param.element_size() == 4 and param.data_ptr() is not None
    assert model.to("cpu") is model and model.float() is model
    model.to(torch.float32)
    step(engine, toy_batches(1))


def test_shapes_and_moves_go_on_working():
    run_on(2, looks)


def copies(rank: int, world_size: int) -> None:
    engine = engine_after_a_step()
    model = engine.module
    with zero.GatheredParameters(model.parameters()):
        values = weights_of(model)
    copied = copy.deepcopy(model)
    assert all(torch.equal(value, values[name]) for name, value in weights_of(copied).items())
    # An ordinary model: it runs alone, trains, and leaves the engine alone.
    (batch,) = toy_batches(1)
    calls = engine.comm.calls["all_gather"]
    loss_of(copied(**batch)).backward()
    assert all(type(param) is nn.Parameter for param in copied.parameters())
    assert all(param.grad is not None for param in copied.parameters())
    assert engine.comm.calls["all_gather"] == calls
    with pytest.raises(UsageError, match=r"copy.deepcopy\(engine.module\)"):
        copy.deepcopy(engine)
    step(engine, toy_batches(1))


def test_a_copy_of_the_model_is_an_ordinary_model():
    run_on(2, copies)


def early(rank: int, world_size: int) -> None:
    """Before there is an engine, and after it is gone."""
    with zero.Init():
        model = nn.Linear(40, 40)
    with pytest.raises(UsageError, match="would read the values of parameter 'weight'"):
        model.weight.norm()
    engine, _ = start(model, ds_config(stage3_param_persistence_threshold=0))
    engine.destroy()
    with pytest.raises(UsageError, match="would read the values of parameter 'weight'"):
        model.weight.norm()
    with pytest.raises(UsageError, match="engine was destroyed.*before train"):
        engine(torch.zeros(1, 40))


def test_reads_before_and_after_an_engine():
    run_on(2, early)


def replaces(rank: int, world_size: int) -> None:
    """`param.data = tensor`, as PEFT's initializations do it, inside of the context and, where the
    parameter is always unsharded, anywhere between two passes.
    """
    for stage in (1, 3):
        model = toy()
        engine, _ = start(model, CONFIG | {"zero_optimization": {"stage": stage}})
        step(engine, toy_batches(1))
        weight, new = model.head.weight, torch.full_like(model.head.weight, 0.5)
        with zero.GatheredParameters(weight, modifier_rank=0):
            weight.data = new if rank == 0 else torch.zeros_like(new)
        assert torch.equal(zero.fragments.safe_get_full_fp32_param(weight), new)
        if stage == 1:
            weight.data = new / 2
            with torch.no_grad():
                engine(**toy_batches(1)[0])
            assert torch.equal(zero.fragments.safe_get_full_fp32_param(weight), new / 2)
            step(engine, toy_batches(1))
            assert not torch.equal(weight, new / 2), "it is trained"
        refused = pytest.raises(UsageError, match="'head.weight' had shape")
        with refused, zero.GatheredParameters(weight, modifier_rank=0):
            weight.data = torch.zeros(3)
        step(engine, toy_batches(1))


def test_replaced_data_are_taken_over():
    run_on(2, replaces)


def nests(rank: int, world_size: int) -> None:
    """What is written in an inner context, or by a fragment, is no lost change of the outer one."""
    model = toy()
    config = ds_config(stage3_param_persistence_threshold=0, enable_sanity_checks=True)
    engine, _ = start(model, config)
    step(engine, toy_batches(1))
    weight = model.head.weight
    with zero.GatheredParameters(weight):
        with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.fill_(0.25)
        assert weight.eq(0.25).all()
    new = torch.full_like(weight, 0.5)
    with zero.GatheredParameters(weight):
        zero.fragments.safe_set_full_fp32_param(weight, new)
        assert torch.equal(weight, new)
    assert engine.residency.live == 0
    assert torch.equal(zero.fragments.safe_get_full_fp32_param(weight), new)
    step(engine, toy_batches(1))


def test_contexts_inside_of_each_other():
    run_on(2, nests)


class KeepsViews(nn.Sequential):
    """Keeps views of its layers' weights: of one that has run, and of one that will."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.second = self[1].weight.detach()
        x = self[0](x)
        self.first = {"rows": [self[0].weight.data[0]], "all": self[0].weight.t()}
        return self[1](x)


def reads_kept_views(rank: int, world_size: int, grad: bool) -> None:
    torch.manual_seed(1)
    model = KeepsViews(nn.Linear(256, 256), nn.Linear(256, 1))
    engine = sgd_engine(model, stage3_max_live_parameters=0)

    def weights() -> list[torch.Tensor]:
        with zero.GatheredParameters(model.parameters()):
            return [layer.weight.detach().clone() for layer in model]

    def check(first: torch.Tensor, second: torch.Tensor) -> None:
        assert torch.equal(model.first["rows"][0], first[0])
        assert torch.equal(model.first["all"].detach(), first.t())
        assert torch.equal(model.second, second)

    for _ in range(3):
        before = weights()
        with torch.set_grad_enabled(grad):
            loss = engine(torch.randn(2, 256)).square().mean()
        check(*before)
        if grad:
            engine.backward(loss)
            check(*before)
            engine.step()
            check(*weights())
    with zero.GatheredParameters(model[0].weight, modifier_rank=1), torch.no_grad():
        model[0].weight.mul_(0.5)
    check(*weights())
    assert engine.residency.live == 0


@pytest.mark.parametrize("grad", [True, False])
def test_views_of_a_weight_that_a_forward_has_kept(grad):
    """As in plain torch, they show the weights as they are now, after a step too."""
    run_on(2, reads_kept_views, grad)
