"""Frozen tensors of quantized layers are sharded, and their bits do not change."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import ds_config
from tests.processes import on_ranks, run_on
from zero.core.param_group import owning_group
from zero.core.quantized_weights import quantized_tensors
from zero.core.sharded_param import PlaceholderView, ShardedParameter, local
from zero.errors import UsageError

WIDTH = 64


class Codes(nn.Module):
    """8-bit floats and an fp32 scale, both parameters, as transformers' FP8. The weight lies
    transposed in memory. It has values of other dtypes, too.
    """

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn).t()
        frozen = {
            "weight": weight,
            "weight_scale_inv": torch.rand(WIDTH, 1),
            "mask": torch.rand(WIDTH) > 0.5,
            "phases": torch.randn(WIDTH, dtype=torch.complex64),
            "factor": torch.tensor(1.5, dtype=torch.float64),
            "indices": torch.arange(WIDTH),
        }
        for name, value in frozen.items():
            setattr(self, name, nn.Parameter(value, requires_grad=False))
        self.bias = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def matrix(self) -> torch.Tensor:
        scale = self.weight_scale_inv * self.factor.float() * self.mask.float()
        return self.weight.float() * scale * self.phases.real.abs()[self.indices]


class Carrier(nn.Parameter):
    """A parameter that carries what decodes it, and whose class other libraries ask for."""

    def __new__(cls, data: torch.Tensor, state: object = None) -> Carrier:
        made = torch.Tensor._make_subclass(cls, data, False)
        made.state = state
        return made


class Carried(nn.Module):
    """Codes that are stored as bf16: all 65,536 patterns of 16 bits, most NaNs among them."""

    def __init__(self) -> None:
        super().__init__()
        patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        state = SimpleNamespace(absmax=torch.rand(1 << 10), parts=[torch.rand(WIDTH, WIDTH)])
        self.weight = Carrier(patterns.view(torch.bfloat16), state)
        self.state = state

    def matrix(self) -> torch.Tensor:
        codes = self.weight.view(torch.int16)[: WIDTH * WIDTH].float().view(WIDTH, WIDTH)
        return codes / 32768 * self.weight.state.parts[0] * self.state.absmax.mean()


class Aliased(nn.Module):
    """An int8 weight and a second object over the same memory, as bitsandbytes' `CB`."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.holder = SimpleNamespace(codes=self.weight.data)

    def matrix(self) -> torch.Tensor:
        assert self.holder.codes.data_ptr() == self.weight.data_ptr()
        return self.holder.codes.float() / 127


class Buffered(nn.Module):
    """Codes and scales in buffers, as GPTQ."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-(2**31), 2**31 - 1, (WIDTH, WIDTH), dtype=torch.int32)
        self.register_buffer("qweight", codes)
        self.register_buffer("scales", torch.rand(WIDTH, WIDTH).half())
        self.register_buffer("seen", torch.zeros(1))

    def matrix(self) -> torch.Tensor:
        return self.qweight.float() / 2**31 * self.scales.float()


class Wide(nn.Module):
    """Codes whose half is over 1 MiB, so that offload to files puts them into a file."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (WIDTH, 1 << 16), dtype=torch.uint8)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def matrix(self) -> torch.Tensor:
        return self.weight[:, :WIDTH].float() / 255


FORMATS = [Codes, Carried, Aliased, Buffered]


class Layer(nn.Module):
    """A frozen quantized layer and a trainable adapter."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.base = kind()
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.base.matrix()
        assert all(torch.equal(*pair) for pair in self.pairs), "bits have changed"
        return x + (x @ matrix.to(x.dtype) + self.adapter(x)).tanh()

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes of each frozen tensor, as they are and as they were made."""
        return [(bits(each.tensor), self.made[each.name]) for each in tensors_of(self.base)]


class Model(nn.Module):
    is_quantized = True

    def __init__(self, formats: Sequence[type] = FORMATS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(kind) for kind in formats])
        for layer in self.layers:
            layer.made = Plain({each.name: bits(each.tensor) for each in tensors_of(layer.base)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class Plain(dict):
    """No `Mapping` of the layer, so that nothing looks for tensors in it."""

    def __init__(self, values: dict) -> None:
        super().__init__(values)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


def tensors_of(module: nn.Module) -> list[Any]:
    return quantized_tensors(module, buffers=None)


def config(**keys: object) -> dict:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    return ds_config(**{"stage3_param_persistence_threshold": 0, "optimizer": optimizer} | keys)


def start(settings: dict) -> tuple[Model, Any]:
    model = Model()
    params = [param for param in model.parameters() if param.requires_grad]
    return model, zero.initialize(model=model, model_parameters=params, config=settings)[0]


def steps(engine: Any, dtype: torch.dtype = torch.float32, place: str = "cpu") -> list[float]:
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(3):
        loss = engine(torch.randn(2, WIDTH, generator=generator).to(place, dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained(rank: int, world_size: int, settings: dict, dtype: torch.dtype) -> Any:
    _, engine = start(settings)
    losses = steps(engine, dtype)
    groups = [group for group in engine.groups if group.packed]
    if settings["zero_optimization"].get("stage3_max_live_parameters") == 0:
        layers = Counter[str]()
        for group in engine.groups:
            layers[group.name] += group.layout.numel
        assert engine.residency.peak == max(layers.values())
    held = sum(group.full.nbytes if group.persistent else group.shard.nbytes for group in groups)
    return losses, held, sum(group.layout.padded for group in groups)


# All 65,536 patterns of bf16 are among the weights, and each forward compares all bytes.
SETTINGS = {
    "sharded": config(stage3_max_live_parameters=0),
    "persistent threshold": config(stage3_param_persistence_threshold=10**6),
    "host": config(offload_param={"device": "cpu"}),
    "quantized weights": config(zero_quantized_weights=True),
    "quantized frozen weights": config(zero_quantized_nontrainable_weights=True),
    "bf16": config(bf16={"enabled": True}),
    "fp16": config(fp16={"enabled": True, "initial_scale_power": 2}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_bits_survive_training_and_each_rank_holds_half(case):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case, torch.float32)
    for losses, held, whole in run_on(2, trained, SETTINGS[case], dtype):
        assert all(loss == loss for loss in losses) and whole > 160_000
        # A few small ones are in a persistent group.
        assert whole <= held * 2 < whole + (4096 if "threshold" in case else 1)


@pytest.mark.parametrize("section", [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}])
def test_bits_survive_groups_of_ranks(section):
    for _, held, whole in run_on(4, trained, config(**section), torch.float32):
        assert held == whole // (2 if "mics_shard_size" in section else 4)


@on_ranks(2)
def test_while_they_are_sharded(rank, world_size):
    model, engine = start(config())
    codes, carried, aliased, buffered = (layer.base for layer in model.layers)
    for name, read in {
        "layers.0.base.weight": lambda: codes.weight.float().sum(),
        "layers.1.base.weight.state.absmax": lambda: carried.state.absmax.sum(),
        "layers.2.base.weight": lambda: aliased.holder.codes + 1,
        "layers.3.base.qweight": lambda: buffered.qweight + 1,
    }.items():
        with pytest.raises(UsageError, match=name):
            read()
    assert type(carried.weight).__name__ == "Carrier"
    assert isinstance(carried.weight, ShardedParameter)

    absmax = carried.state.absmax
    model.to("cpu")
    carried.state.absmax = carried.state.absmax.to("cpu")
    assert carried.state.absmax is absmax
    assert isinstance(carried.weight.data, PlaceholderView)

    with zero.GatheredParameters(carried.weight):  # it is shown with what decodes it
        assert all(torch.equal(*pair) for pair in model.layers[1].pairs)
    with zero.GatheredParameters(codes.weight, modifier_rank=0):
        codes.weight.data = torch.full_like(codes.weight, 2.0 if rank == 0 else 1.0)
    with zero.GatheredParameters(codes.weight):
        assert (codes.weight.float() == 2.0).all()

    copied = copy.deepcopy(model)
    layer = copied.layers[1]
    assert all(torch.equal(*pair) for pair in layer.pairs)
    assert layer.base.weight.state is layer.base.state
    frozen = [each.tensor for layer in copied.layers for each in tensors_of(layer.base)]
    assert not any(map(owning_group, frozen)), "a copy is ordinary"

    engine.offload_states()
    engine.reload_states()
    model.layers[0].made["weight"] = bits(torch.full((WIDTH, WIDTH), 2.0).to(torch.float8_e4m3fn))
    steps(engine)
    with zero.GatheredParameters(codes.weight):
        assert local(codes.weight).stride() == (1, WIDTH)


@pytest.mark.parametrize("in_place", [True, False])
@on_ranks(2)
def test_a_forward_that_writes_to_them_is_refused_by_name(rank, world_size, in_place):
    model, engine = start(config())

    def write(module: nn.Module, args: object) -> None:
        if in_place:
            module.base.scales += 1
        else:
            module.base.qweight.data = torch.zeros_like(module.base.qweight)

    model.layers[3].register_forward_pre_hook(write)
    model.layers[3].made = dict.fromkeys(())
    Layer.pairs = property(lambda self: [])
    with pytest.raises(UsageError) as error:
        steps(engine)
    name = "scales" if in_place else "qweight"
    message = str(error.value)
    assert f"layers.3.base.{name}" in message and "stage3_shard_buffers" in message


@pytest.mark.parametrize("shard", [None, True, False])
@on_ranks(2)
def test_buffers_of_other_models_are_sharded_if_asked_for(rank, world_size, shard):
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_buffer("table", torch.arange(1024.0))
    model[0].register_buffer("tiny", torch.ones(4))
    settings = config(stage3_shard_buffers=shard)
    zero.initialize(model=model, model_parameters=model.parameters(), config=settings)
    assert [owning_group(buffer) is not None for buffer in model.buffers()] == [
        shard is True,
        False,
    ]
