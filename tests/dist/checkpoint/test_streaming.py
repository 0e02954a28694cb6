"""zero.stream_weights: each rank gets every weight once, in bounded memory. zero.GatheredWhenRead:
adapters are merged into blocks when they are read.
"""

from __future__ import annotations

import copy
from collections import Counter

import peft
import pytest
import torch

import zero
from tests.dist.toys import BLOCK, toy, toy_batches
from tests.dist.training import ds_config, start, step, weights_of
from tests.processes import on_ranks, run_on
from zero.errors import UsageError
from zero.streaming import GatheredWhenRead

MODULES = {"target_modules": ["up", "down"], "r": 3, "lora_alpha": 5}
SHARDED = {"stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (2, 2), (3, 1), (3, 3)])
@on_ranks()
def test_every_weight_comes_once_within_the_limit(rank, world_size, stage):
    true = weights_of(toy(tied=True))
    del true["head.weight"]  # the same as stem.weight
    config = ds_config(stage=stage, stage3_param_persistence_threshold=30)
    large, small = 1 << 30, 6 * BLOCK
    for dtype, most in ((None, large), (torch.bfloat16, large), (None, small), (torch.bfloat16, 0)):
        engine, _ = start(toy(tied=True), config)
        found = {}
        for name, value in zero.stream_weights(engine, dtype, most):
            assert name not in found, f"{name} comes twice"
            if stage == 3 and world_size > 1 and most == small and value.dim() > 1:
                assert value.untyped_storage().nbytes() <= most // 2
            found[name] = value.clone()
        assert found.keys() == true.keys()
        for name, value in true.items():
            assert torch.equal(found[name], value.to(dtype or value.dtype)), name
        assert engine.residency.live == 0


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_a_step_between_two_weights_is_an_error(rank, world_size, stage):
    engine, _ = start(toy(), ds_config(stage=stage, stage3_param_persistence_threshold=30))
    (batch,) = toy_batches(1)
    weights = zero.stream_weights(engine, max_bytes=6 * BLOCK)
    next(weights)
    engine.backward(engine(**batch))
    engine.step()
    with pytest.raises(UsageError, match="would be those of another step"):
        next(weights)
    found = {name: value.clone() for name, value in zero.stream_weights(engine)}
    assert all(value.isfinite().all() for value in found.values())


def stopping(rank: int, world_size: int, stops: bool) -> list[list[float]]:
    """With `stops`, a reader of weights stops in the middle, on all ranks alike."""
    engine, _ = start(toy(), ds_config(**SHARDED))
    losses = []
    for batch in toy_batches(4):
        for _ in zero.stream_weights(engine, max_bytes=0) if stops else ():
            break
        losses.append(step(engine, [batch]))
    return losses


def test_training_goes_on_after_reading_only_a_part_of_the_weights():
    assert run_on(2, stopping, True) == run_on(2, stopping, False)


ADAPTERS = {
    "LoRA": peft.LoraConfig(**MODULES, init_lora_weights=False),
    "DoRA": peft.LoraConfig(**MODULES, init_lora_weights=False, use_dora=True),
    "a bias": peft.LoraConfig(**MODULES, init_lora_weights=False, lora_bias=True),
    "a trained head": peft.LoraConfig(**MODULES, init_lora_weights=False, modules_to_save=["head"]),
    "tokens": peft.LoraConfig(
        **MODULES, init_lora_weights=False, trainable_token_indices={"stem": [1, 3]}
    ),
    "IA3": peft.IA3Config(
        target_modules=["up", "down"], feedforward_modules=["down"], init_ia3_weights=False
    ),
}


def adapted(config: peft.PeftConfig, tied: bool = False) -> peft.PeftModel:
    """A model with two active adapters, or one if that trains copies or tokens."""
    torch.manual_seed(4)
    model = peft.get_peft_model(toy(tied=tied), copy.deepcopy(config))
    if not getattr(config, "modules_to_save", None) and name_of(config) != "tokens":
        model.add_adapter("second", copy.deepcopy(config))
        model.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "trainable_tokens_delta" in name:
                param.normal_()
    return model


def name_of(config: peft.PeftConfig) -> str:
    return next(name for name, known in ADAPTERS.items() if known is config)


@pytest.mark.parametrize(("threshold", "safe"), [(0, True), (30, False)])
@pytest.mark.parametrize("name", ADAPTERS)
@on_ranks(2)
def test_a_model_is_read_and_merged_block_by_block(rank, world_size, name, threshold, safe):
    reference = adapted(ADAPTERS[name])
    before = copy.deepcopy(reference.state_dict())
    reference.merge_adapter(safe_merge=safe)
    expected = dict(reference.named_parameters())
    model = adapted(ADAPTERS[name])
    engine, _ = start(model, ds_config(stage3_param_persistence_threshold=threshold))
    layers = [module for module in model.modules() if hasattr(type(module), "get_base_layer")]
    kinds = {type(layer) for layer in layers}
    assert GatheredWhenRead.serves(model) == (threshold == 0 or name not in ("a bias", "IA3"))
    if not GatheredWhenRead.serves(model):
        with pytest.raises(ValueError, match=r"blocks\.0\.down.*not sharded"):
            GatheredWhenRead(model)
        with zero.GatheredParameters(model.parameters()):  # what the error says to do instead
            model.merge_adapter(safe_merge=safe)
            for param_name, param in model.named_parameters():
                assert torch.equal(param, expected[param_name]), param_name
            model.unmerge_adapter()
        return
    with GatheredWhenRead(model, shapes_only=True):
        model.merge_adapter()
        for param_name, param in model.named_parameters():
            assert param.data.shape == expected[param_name].shape
        model.unmerge_adapter()
    assert engine.residency.peak == 0, "shapes cost nothing"
    blocks = Counter()
    for group in engine.groups:
        blocks[tuple(group.modules)] += 0 if group.persistent else group.layout.numel
    for _ in range(2):
        calls = engine.comm.calls["all_gather"]
        with GatheredWhenRead(model):
            model.merge_adapter(safe_merge=safe)
            assert all(layer.merged_adapters == layer.active_adapters for layer in layers)
            assert engine.residency.live == 0
            kept = {param_name: param.data for param_name, param in model.named_parameters()}
            model.unmerge_adapter()
        for param_name, value in kept.items():
            assert torch.equal(value, expected[param_name]), param_name
        sharded = sum(not group.persistent for group in engine.groups)
        assert engine.comm.calls["all_gather"] - calls == sharded
        assert engine.residency.peak == max(blocks.values()) and engine.residency.live == 0
        assert {type(layer) for layer in layers} == kinds
        assert not any(layer.merged_adapters or layer.__dict__.get("_caches") for layer in layers)
    for param_name, value in zero.stream_weights(engine):
        assert torch.equal(value, before[param_name]), param_name
    engine(**toy_batches(1)[0])  # the engine notices reads again


@pytest.mark.parametrize("name", ["LoRA", "DoRA", "a trained head"])
@on_ranks(2)
def test_a_model_is_unloaded_block_by_block(rank, world_size, name):
    expected = adapted(ADAPTERS[name]).merge_and_unload().state_dict()
    model = adapted(ADAPTERS[name])
    engine, _ = start(model, ds_config(**SHARDED))
    with GatheredWhenRead(model):
        merged = model.merge_and_unload()
        assert engine.residency.live == 0
        found = {key: param.data.clone() for key, param in merged.named_parameters()}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert engine.residency.peak <= 2 * (4 * BLOCK), "one block with its adapters"


@on_ranks(2)
def test_an_error_leaves_the_model_as_it_was(rank, world_size):
    """After an error in the context, everything is as before it."""
    model = adapted(ADAPTERS["LoRA"])
    engine, _ = start(model, ds_config(**SHARDED))
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(RuntimeError, match="on purpose"), GatheredWhenRead(model):
        model.merge_adapter()
        assert model.base_model.model.blocks[0].up.base_layer.weight.sum().isfinite()
        raise RuntimeError("on purpose")
    assert kinds == [type(module) for module in model.modules()]
    assert engine.residency.live == 0
    assert not any(getattr(module, "merged_adapters", None) for module in model.modules())
    with pytest.raises(ValueError, match="GatheredParameters"):
        model.base_model.model.blocks[0].up.base_layer.weight.sum()
