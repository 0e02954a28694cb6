"""zero.Init: sharding while a model is built."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

import zero
from tests.dist.toys import BLOCK, WIDTH, Toy, bytes_of, toy, toy_batches
from tests.dist.training import (
    Curve,
    assert_same_training,
    assert_same_weights,
    curve_on,
    ds_config,
    start,
    train_in_slices,
    train_zero,
)
from tests.parity import models
from tests.processes import on_ranks
from zero.core.param_group import owning_group
from zero.errors import UsageError

STEPS = 4
CONFIG = ds_config(stage3_param_persistence_threshold=30)


def built(seed: int, tied: bool = False, **options) -> Toy:
    torch.manual_seed(seed)
    with zero.Init(**options):
        return Toy(tied=tied)


def from_init(rank: int, world_size: int, tied: bool) -> Curve:
    """Build a model under `Init`.

    Each rank draws other values, and all must get those of rank 0.
    """
    model = built(3 + rank, tied, config_dict_or_path=CONFIG)
    return train_zero(start(model, CONFIG)[0], toy_batches(STEPS))


def ordinary(rank: int, world_size: int, tied: bool) -> Curve:
    torch.manual_seed(3 + rank)
    return train_zero(start(Toy(tied=tied), CONFIG)[0], toy_batches(STEPS))


def plain(rank: int, world_size: int, tied: bool, slices: int) -> Curve:
    return train_in_slices(toy(tied=tied), toy_batches(STEPS), slices)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_model_built_under_init_trains_as_rank_0s_plain_one(world_size, tied):
    expected = curve_on(1, plain, tied, world_size)
    for make in (from_init, ordinary):
        found = curve_on(world_size, make, tied)
        assert found.losses == expected.losses
        assert_same_weights(found.weights, expected.weights)


class Watch:
    """Measures the memory of all parameters each time a module is assigned to its parent, before
    `Init` sees that.
    """

    def __init__(self) -> None:
        self.modules: list[weakref.ref] = []
        self.peak = 0

    def __call__(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        self.modules.append(weakref.ref(module))
        self.peak = max(self.peak, self.elements())

    def elements(self) -> int:
        alive = [module for reference in self.modules if (module := reference()) is not None]
        return bytes_of(param for module in alive for param in module.parameters()) // 4


@on_ranks(2)
def test_no_rank_holds_more_than_its_shards_and_the_module_being_built(rank, world_size):
    watch, total = Watch(), sum(param.numel() for param in toy().parameters())
    handle = register_module_module_registration_hook(watch)
    model = built(3)
    handle.remove()
    shards = sum(owning_group(param).shard.numel() for param in model.parameters())
    assert watch.peak <= BLOCK, "one block at most"
    assert watch.elements() == 1, "all parameters show one and the same element"
    assert total / 2 <= shards <= 0.6 * total


@on_ranks(2)
def test_dtype_is_the_arguments_or_the_configurations_or_the_one_built(rank, world_size):
    bf16 = {"bf16": {"enabled": True}}
    for dtype, options in (
        (torch.float32, {}),
        (torch.bfloat16, {"dtype": torch.bfloat16}),
        (torch.bfloat16, {"config": ds_config(**bf16)}),
        (torch.float16, {"config_dict_or_path": ds_config(**bf16), "dtype": torch.float16}),
    ):
        model = built(0, **options)
        assert {param.dtype for param in model.parameters()} == {dtype}
        with zero.GatheredParameters(model.parameters()):
            assert {param.dtype for param in model.parameters()} == {dtype}


@on_ranks(2)
def test_init_ends_where_its_context_ends(rank, world_size):
    """Count sharded parameters of modules made inside of an inner `Init`, after it, after both, and
    when disabled.
    """
    with zero.Init():
        with zero.Init():
            inner = nn.Linear(WIDTH, WIDTH)
        # An engine may be made here for a complete model.
        assert owning_group(inner.weight) is not None
        between = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    outside = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with zero.Init(enabled=False):
        disabled = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    built_before = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    zero.Init(module=built_before)
    with pytest.raises(KeyError), zero.Init():
        raise KeyError("in the middle of a model")
    after_error = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    modules = (inner, between, outside, disabled, built_before, after_error)
    assert [
        sum(owning_group(param) is not None for param in module.parameters()) for module in modules
    ] == [2, 2, 0, 0, 2, 0]


@on_ranks(2, timeout=60.0)
def test_a_module_on_meta_on_one_rank_is_an_error_of_all(rank, world_size):
    with pytest.raises(UsageError, match="(?s)weight of a Linear.*meta on rank 1"), zero.Init():
        nn.Sequential(nn.Linear(WIDTH, WIDTH, device="meta" if rank else "cpu"))


@on_ranks(2)
def test_a_model_of_init_that_has_no_engine_says_what_it_needs(rank, world_size):
    with zero.Init(config=ds_config()):
        model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    with pytest.raises(UsageError, match="give it to zero.initialize, a frozen one without an opt"):
        model(torch.ones(1, 64))
    with pytest.raises(UsageError, match="mpu"):
        zero.Init(mpu="a group")


class DrawsIntoData(nn.Module):
    """Draws its weights as models do that were written before transformers 5.0."""

    def __init__(self):
        super().__init__()
        self.shared, self.linear = nn.Embedding(40, 8, padding_idx=3), nn.Linear(8, 8)
        for module in (self.shared, self.linear):
            module.weight.data.normal_(mean=0.0, std=2.0)
        self.shared.weight.data[self.shared.padding_idx].zero_()
        self.linear.bias.data.zero_()


@pytest.mark.parametrize("make", [models.t5, DrawsIntoData])
@on_ranks(2)
def test_weights_drawn_after_sharding_are_rank_0s(rank, world_size, make):
    """The constructor of the whole model draws the weights. All of them are sharded by then."""
    torch.manual_seed(20 + rank)
    with zero.Init():
        model = make()
    torch.manual_seed(20)
    true = make().state_dict()
    with zero.GatheredParameters(model.parameters()):
        assert_same_weights(model.state_dict(), true)
        assert model.shared.weight.std() > 0.5


def loaded_in_init(rank: int, world_size: int) -> Curve:
    """Build a model of bf16 under `Init`, load it as transformers does, and train it."""
    config = ds_config(bf16={"enabled": True})
    values = models.build("deepseek").state_dict()
    with zero.Init(config_dict_or_path=config):
        model = models.build("deepseek")
    for name, param in model.named_parameters():
        with zero.GatheredParameters([param], modifier_rank=0):
            if rank == 0:
                param.data.copy_(values[name])
    gates = {p for name, p in model.named_parameters() if name.endswith("gate.weight")}
    assert gates == {p for p in model.parameters() if p.dtype == torch.float32}
    return train_zero(start(model, config)[0], models.batches("deepseek", STEPS))


def in_bf16(rank: int, world_size: int, ranks: int) -> Curve:
    model = models.build("deepseek")
    for name, param in model.named_parameters():
        if not name.endswith("gate.weight"):
            param.data = param.data.bfloat16()
    batches = models.batches("deepseek", STEPS)
    return train_in_slices(model, batches, ranks, dtype=torch.bfloat16)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_transformers_keeps_in_fp32_is_loaded_in_fp32(ranks):
    assert_same_training(curve_on(ranks, loaded_in_init), curve_on(1, in_bf16, ranks))
