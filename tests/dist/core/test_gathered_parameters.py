"""Values of sharded parameters: read and written inside of zero.GatheredParameters, and otherwise
an error.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import zero
from tests.dist.toys import gathered, recorded, toy, toy_batches
from tests.dist.training import (
    ds_config,
    loss_of,
    sgd_engine,
    start,
    step,
    weights_of,
)
from tests.processes import on_ranks, run_on
from zero.core.param_group import ParamGroup
from zero.core.sharded_param import ShardedParameter
from zero.errors import UsageError
from zero.fragments import safe_get_full_fp32_param
from zero.offload import tiers

SOME_PERSISTENT = ds_config(stage3_param_persistence_threshold=30)


@on_ranks(2)
def test_reading(rank, world_size):
    true, model = weights_of(toy()), toy()
    engine, _ = start(model, SOME_PERSISTENT)

    def shows(*names: str) -> bool:
        return all(torch.equal(model.get_parameter(name), true[name]) for name in names)

    with zero.GatheredParameters(model):
        assert shows(*true)
    with zero.GatheredParameters(iter([model.blocks[0].up.weight, nn.Parameter(torch.ones(3))])):
        with torch.no_grad():
            engine(**toy_batches(1)[0])
        assert shows("blocks.0.up.weight")
        assert isinstance(model.blocks[0].down.weight, ShardedParameter)
        with zero.GatheredParameters(model.blocks[0].parameters()):
            assert shows("blocks.0.down.weight")
        assert shows("blocks.0.up.weight")
        assert isinstance(model.blocks[0].down.weight, ShardedParameter)
    with zero.GatheredParameters(model.parameters(), enabled=False):
        assert isinstance(model.head.weight, ShardedParameter)
    with zero.GatheredParameters([]):
        pass
    with torch.no_grad(), zero.GatheredParameters(model.head.weight):
        model.head.weight.zero_()
    with zero.GatheredParameters(model.head.weight):
        assert shows("head.weight"), "a change without a modifier rank is discarded"
    assert engine.residency.live == gathered(engine) == 0


@on_ranks(2)
def test_a_loop_over_single_parameters_gathers_each_one_alone(rank, world_size):
    true = weights_of(toy())
    engine, _ = start(toy(), ds_config(stage3_param_persistence_threshold=0))
    sent = engine.comm.elements
    before = sent["broadcast"] + sent["all_gather"]
    for name, param in engine.module.named_parameters():
        with zero.GatheredParameters([param]):
            assert torch.equal(param, true[name]), name
            assert engine.residency.live <= max(value.numel() for value in true.values())
        assert isinstance(param, ShardedParameter) and engine.residency.live == 0
    gathered = sent["broadcast"] + sent["all_gather"] - before
    assert gathered <= sum(value.numel() for value in true.values()) + 2


@on_ranks(2)
def test_all_ranks_gather_in_one_order_whatever_that_of_the_argument(rank, world_size):
    """A set of parameters, and a list of them, which has another order on each rank."""
    model, found = toy(), []
    start(model, SOME_PERSISTENT)
    params = list(model.parameters())[:: -1 if rank else 1]
    for given in (set(params), params):
        with recorded(ParamGroup, "all_gather") as events, zero.GatheredParameters(given):
            found.append([group.name for _, group in events])
    order = ["stem.weight", *(f"blocks.{i}" for i in range(4)), "head.weight"]
    assert found == [order, order]


@on_ranks(2)
def test_a_step_while_values_are_shown_is_refused_and_can_be_made_after(rank, world_size):
    engine, _ = start(toy(), SOME_PERSISTENT)
    engine.backward(loss_of(engine(**toy_batches(1)[0])))
    refused = pytest.raises(ValueError, match="group 'head.weight' .* leave that context before")
    with zero.GatheredParameters(engine.module.head.weight), refused:
        engine.step()
    engine.step()
    assert [engine.global_steps, gathered(engine)] == [1, 0]


def doubled(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)


def masters_beside_a_write(rank: int, world_size: int, folder: str) -> dict[str, list[str]]:
    """By place of the masters: the parameters whose fp32 values a write after a step left wrong."""
    tiers.LEAST_BYTES_IN_A_FILE = 1
    places = {
        "none": {},
        "cpu": {"overlap_step": True},
        "nvme": {"nvme_path": folder, "overlap_step": True},
    }
    found = {}
    for device, options in places.items():
        sections = {"offload_optimizer": {"device": device, **options}, "bf16": {"enabled": True}}
        values = []
        for writes in (False, True):
            model = toy()
            engine, _ = start(model, ds_config(stage3_param_persistence_threshold=30, **sections))
            step(engine, toy_batches(1))
            # Of a sharded and a persistent group.
            written = model.blocks[1].up.weight, model.blocks[1].norm.bias
            with torch.no_grad(), zero.GatheredParameters(written, modifier_rank=0, enabled=writes):
                if rank == 0 and writes:
                    for param in written:
                        param[..., 1] = 0.3
            values.append(
                {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
            )
        expected, actual = values
        for name in ("blocks.1.up.weight", "blocks.1.norm.bias"):
            expected[name][..., 1] = torch.tensor(0.3).bfloat16()
        found[device] = [
            name for name, value in actual.items() if not torch.equal(value, expected[name])
        ]
    return found


def test_a_write_leaves_the_fp32_values_of_all_other_elements(tmp_path):
    found, _ = run_on(2, masters_beside_a_write, str(tmp_path))
    assert found == {"none": [], "cpu": [], "nvme": []}


@on_ranks(2)
def test_an_exception_leaves_the_values_and_nothing_gathered(rank, world_size):
    true, model = weights_of(toy()), toy()
    engine, _ = start(model, SOME_PERSISTENT)
    with pytest.raises(KeyError), zero.GatheredParameters(model.parameters(), modifier_rank=0):
        doubled(model.blocks[2])
        raise KeyError("in the middle")
    assert engine.residency.live == gathered(engine) == 0
    with zero.GatheredParameters(model.parameters()):
        assert torch.equal(model.blocks[2].up.weight, true["blocks.2.up.weight"])
    (loss,) = step(engine, toy_batches(1))
    assert loss == loss


@on_ranks(2)
def test_changes_without_a_modifier_rank_are_refused_on_request(rank, world_size):
    """Under `Init` and in an engine, and they are undone."""
    config = ds_config(stage3_param_persistence_threshold=30, enable_sanity_checks=True)
    with zero.Init(config_dict_or_path=config):
        model = toy()
    weight = model.head.weight
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"modification of (head\.)?weight"):
            with torch.no_grad(), zero.GatheredParameters(weight):
                weight.zero_()
        start(model, config)
    with zero.GatheredParameters(weight):
        assert weight.any()


@pytest.mark.parametrize("whole", [True, False])
@on_ranks(2, timeout=60.0)
def test_different_modifier_ranks_are_an_error_of_all(rank, world_size, whole):
    model = toy()
    start(model, ds_config(stage3_param_persistence_threshold=0))
    params = model if whole else model.stem.weight
    with pytest.raises(UsageError, match="modifier_rank: 0 on rank 0, None on rank 1"):
        with zero.GatheredParameters(params, modifier_rank=0 if rank == 0 else None):
            pass
    with zero.GatheredParameters(params), zero.GatheredParameters(params, enabled=rank == 0):
        pass


@on_ranks(2)
def test_what_one_rank_may_not_write_is_an_error_of_all(rank, world_size):
    model = toy()
    start(model, ds_config(stage3_param_persistence_threshold=0))
    with pytest.raises(UsageError, match="rank 1: parameter 'head.weight' had shape"):
        with zero.GatheredParameters([model.head.weight], modifier_rank=1):
            if rank == 1:
                model.head.weight.data = torch.zeros(2, 2)


# -- between two passes


CONFIG = ds_config(stage3_param_persistence_threshold=30)


def engine_after_a_step() -> zero.ZeroEngine:
    engine, _ = start(toy(), CONFIG)
    step(engine, toy_batches(1))
    return engine


@on_ranks(2)
def test_reading_is_an_error_that_names_parameter_and_remedy(rank, world_size):
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
        lambda: weight.data.add_(1.0),
        lambda: weight.detach()[0].fill_(1.0),
        lambda: weight.copy_(torch.zeros_like(weight)),
        lambda: weight.__setitem__(0, 1.0),
        lambda: weight.__iadd__(1.0),
        lambda: torch.add(torch.ones_like(weight), 1, out=weight),
        lambda: torch.nn.init.normal_(weight),
    ):
        with torch.no_grad(), pytest.raises(UsageError, match=r"parameter '.*modifier_rank=0"):
            write()


@on_ranks(2)
def test_shapes_and_moves_go_on_working(rank, world_size):
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


@on_ranks(2)
def test_a_copy_of_the_model_is_an_ordinary_model(rank, world_size):
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


@on_ranks(2)
def test_reads_before_and_after_an_engine(rank, world_size):
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


@on_ranks(2)
def test_replaced_data_are_taken_over(rank, world_size):
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
        step(engine, toy_batches(1))


@on_ranks(2)
def test_contexts_inside_of_each_other(rank, world_size):
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


class KeepsViews(nn.Sequential):
    """Keeps views of its layers' weights: of one that has run, and of one that will."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        will_run = self[1].weight.detach()
        x = super().forward(x)
        self.views = will_run, self[0].weight.data[0]
        return x


@pytest.mark.parametrize("grad", [True, False])
@on_ranks(2)
def test_views_of_a_weight_that_a_forward_has_kept(rank, world_size, grad):
    """As in plain torch, they show the weights as they are now, after a step too."""
    torch.manual_seed(1)
    model = KeepsViews(nn.Linear(256, 256), nn.Linear(256, 1))
    engine = sgd_engine(model, stage3_max_live_parameters=0)

    def check() -> None:
        with zero.GatheredParameters(model.parameters()):
            first, second = model[0].weight.detach().clone(), model[1].weight.detach().clone()
        assert torch.equal(model.views[0], second) and torch.equal(model.views[1], first[0])

    for _ in range(3):
        with torch.set_grad_enabled(grad):
            loss = engine(torch.randn(2, 256)).square().mean()
        check()
        if grad:
            engine.backward(loss)
            check()
            engine.step()
            check()
    with zero.GatheredParameters(model[0].weight, modifier_rank=1), torch.no_grad():
        model[0].weight.mul_(0.5)
    check()
    assert engine.residency.live == 0
