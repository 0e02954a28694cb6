"""Experts that stay on their ranks, over data-parallel ranks, against plain torch in one process on
the same global batches.

As in `test_expert_parallel`, plain torch computes in float64."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from functools import cache
from time import sleep
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
)

import zero
from tests.dist.training import Curve, ds_config, relative, together, train_zero
from tests.parity.models import (
    CLIP,
    INNER,
    MIXTURE,
    NOTHING_PERSISTS,
    ROWS,
    WIDTH,
    batches,
    in_float64,
    mixture,
    start,
)
from tests.processes import run_on
from zero.checkpoint.models import consolidate
from zero.comm.traffic import MOVED, NETWORK
from zero.errors import UsageError
from zero.slicing import blocks

pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="transformers has it since 5.22"
)

STEPS, EXPERTS = 3, 8
CPU = {"device": "cpu"}
SLICES = {"batch_slices": 3}


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    if name == "olmoe":
        experts = {"intermediate_size": INNER, "num_experts": EXPERTS}
        return OlmoeForCausalLM(OlmoeConfig(**MIXTURE | experts | {"head_dim": 6})).train()
    if name == "gpt-oss":
        experts = {"intermediate_size": INNER, "num_local_experts": EXPERTS}
        return GptOssForCausalLM(GptOssConfig(**experts, **MIXTURE)).train()
    if name == "deepseek":
        experts = {"moe_intermediate_size": INNER, "n_routed_experts": EXPERTS, "n_group": 2}
        ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
        sizes = MIXTURE | ranks | {"v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4}
        config = DeepseekV3Config(
            intermediate_size=32, first_k_dense_replace=1, topk_group=1, **experts, **sizes
        )
        return DeepseekV3ForCausalLM(config).train()
    if name == "lora":
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = mixture("mixtral", EXPERTS)
        return adapted(model, *names, init_lora_weights=False, lora_alpha=64)
    return mixture(name, EXPERTS)


def adapted(model: nn.Module, *parameters: str, **keys: Any) -> nn.Module:
    lora = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=list(parameters), **keys)
    return get_peft_model(model, lora)


def configuration(world_size: int, size: int, accumulation: int = 1, **keys: Any) -> dict[str, Any]:
    config = ds_config(accumulation=accumulation, clip=CLIP, **NOTHING_PERSISTS, **keys)
    config["train_micro_batch_size_per_gpu"] = ROWS // accumulation // world_size
    return config | {"expert_parallel": {"enabled": size > 1, "autoep_size": size}}


@cache
def plain(name: str) -> Curve:
    return run_on(1, _plain, name)[0]


def _plain(rank: int, world_size: int, name: str) -> Curve:
    return in_float64(build(name), batches("llama", STEPS))


def trained(rank: int, world_size: int, cases: list[tuple[str, str, int, dict]]) -> list[Curve]:
    found = []
    for name, implementation, size, keys in cases:
        model, keys = build(name), dict(keys)
        model.set_experts_implementation(implementation)
        if (reentrant := keys.pop("reentrant", None)) is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        engine = start(model, configuration(world_size, size, **keys))
        found.append(train_zero(engine, batches("llama", STEPS)))
        engine.destroy()
    return found


def compare(found: Curve, expected: Curve) -> None:
    assert min(found.norms) > CLIP, "clipping must be at work"
    assert relative(found.mean_losses(), expected.mean_losses()) < 1e-6
    assert relative(found.norms, expected.norms) < 1e-6
    assert found.weights.keys() == expected.weights.keys()
    for key, value in expected.weights.items():
        torch.testing.assert_close(found.weights[key], value.float(), rtol=0, atol=2e-6, msg=key)


ON_TWO = [
    ("mixtral", "eager", 2, {"stage": 0}),
    ("qwen3", "grouped_mm", 2, {"stage": 1}),
    ("olmoe", "eager", 2, {"stage": 3}),
    ("deepseek", "batched_mm", 2, {"stage": 2}),
    ("gpt-oss", "eager", 2, {"stage": 3}),
    ("qwen3", "grouped_mm", 2, {"stage": 3, "activation_checkpointing": SLICES}),
    ("mixtral", "eager", 2, {"stage": 1, "activation_checkpointing": SLICES}),
    ("lora", "eager", 2, {"stage": 1}),
    ("lora", "grouped_mm", 2, {"stage": 3, "reentrant": False}),
]
ON_FOUR = [
    ("mixtral", "eager", 2, {"stage": 0, "accumulation": 3}),
    ("qwen3", "grouped_mm", 2, {"stage": 1, "accumulation": 3, "reentrant": True}),
    ("olmoe", "eager", 4, {"stage": 2, "accumulation": 3, "offload_optimizer": CPU}),
    ("deepseek", "eager", 2, {"stage": 3, "accumulation": 3, "reentrant": False}),
    ("gpt-oss", "grouped_mm", 4, {"stage": 3, "accumulation": 3}),
    ("one-sided", "eager", 2, {"stage": 3, "reentrant": False}),
    (
        "mixtral",
        "grouped_mm",
        2,
        {"stage": 3, "reentrant": True, "offload_param": CPU},
    ),
    ("one-sided", "grouped_mm", 4, {"stage": 0, "reentrant": True}),
]


@pytest.mark.parametrize(("ranks", "cases"), [(4, ON_FOUR), (2, ON_TWO)])
def test_losses_norms_and_weights_are_those_of_plain_torch(ranks, cases):
    of_ranks = run_on(ranks, trained, cases)
    for number, (name, *_) in enumerate(cases):
        compare(together([curves[number] for curves in of_ranks]), plain(name))


# -- slices of batches that differ


def uneven(rank: int, world_size: int, slices: Any) -> list[float]:
    """The norms of steps in which ranks have different numbers of rows, and one of them a mask."""
    blocks.TOKENS = 16  # so that "auto" makes slices of these small batches
    keys = {"activation_checkpointing": {"batch_slices": slices}} if slices else {}
    engine = start(build("mixtral"), configuration(world_size, 2, stage=3, **keys))
    norms = []
    for ids, others in zip(
        (batch["input_ids"] for batch in batches("llama", 3)), ((3, 5), (1, 4), (6, 2)), strict=True
    ):
        ids = ids[: others[rank]]
        mask = torch.ones_like(ids)
        mask[:1, -2:] = rank
        engine.backward(engine(input_ids=ids, labels=ids, attention_mask=mask).loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def test_ranks_agree_on_the_number_of_slices():
    expected = run_on(2, uneven, None)[0]
    for slices in (4, "auto"):
        for norms in run_on(2, uneven, slices):
            assert relative(norms, expected) < 1e-6


# -- checkpoints

HALF = 2


def run(
    world_size: int, size: int, part: slice, load: str = "", save: str = "", **keys: Any
) -> Curve:
    """Train on these batches, from a checkpoint and into another one if they are named."""
    engine = start(build("mixtral"), configuration(world_size, size, **keys))
    if load:
        engine.load_checkpoint(load)
    curve = train_zero(engine, batches("llama", 2 * HALF)[part])
    if save:
        engine.save_checkpoint(save)
        engine.save_16bit_model(save)
    engine.destroy()
    return curve


def resumed_on_four(rank: int, world_size: int, folder: str) -> dict[str, Curve]:
    first, second, of_one, of_all = slice(HALF), slice(HALF, None), f"{folder}/1", f"{folder}/4"
    return {
        "whole": run(4, 2, slice(None)),
        "first": run(4, 2, first, save=folder),
        "as before": run(4, 2, second, folder),
        "over four": run(4, 4, second, folder, stage=2),
        "gathered": run(4, 1, second, folder, stage=1),
        "at stage 0": run(4, 2, second, folder, stage=0),
        "first of one": run(4, 1, first, save=of_one),
        "from one": run(4, 4, second, of_one),
        "first of all": run(4, 4, first, save=of_all, stage=0),
        "from all": run(4, 2, second, of_all),
    }


def resumed_on_two(rank: int, world_size: int, folder: str) -> dict[str, Curve]:
    second = slice(HALF, None)
    return {"on two": run(2, 2, second, folder), "alone": run(2, 1, second, folder)}


def test_checkpoints_resume_with_any_division(tmp_path):
    of_ranks = run_on(4, resumed_on_four, str(tmp_path))
    found = {name: together([curves[name] for curves in of_ranks]) for name in of_ranks[0]}
    of_ranks = run_on(2, resumed_on_two, str(tmp_path))
    found |= {name: together([curves[name] for curves in of_ranks]) for name in of_ranks[0]}
    whole, first = found.pop("whole"), found.pop("first")
    again = found["as before"]
    assert again.norms == whole.norms[HALF:] and again.losses == whole.losses[HALF:]
    for name, value in whole.weights.items():
        assert torch.equal(again.weights[name], value), name
    for name, curve in found.items():
        if not name.startswith("first"):
            assert relative(curve.mean_losses(), whole.mean_losses()[HALF:]) < 1e-6, name
            assert relative(curve.norms, whole.norms[HALF:]) < 1e-6, name
    folders = {"": first, "1": found["first of one"], "4": found["first of all"]}
    for folder, curve in folders.items():
        out = tmp_path / "consolidated" / folder
        consolidate(tmp_path / folder, out)
        for written in (out, tmp_path / folder):
            model = MixtralForCausalLM.from_pretrained(written)
            for name, value in curve.weights.items():
                assert torch.equal(model.state_dict()[name], value), (folder, name)


# -- adapters that are merged


Weights = dict[str, torch.Tensor]


def merged(rank: int, world_size: int, stage: int) -> dict[str, tuple[Weights, Weights]]:
    """Weights in which adapters are merged, and what PEFT makes of the whole model."""
    batch = {name: value[rank::world_size] for name, value in batches("llama", 1)[0].items()}
    engine = start(build("lora"), configuration(world_size, 2, stage=stage))
    model: Any = engine.module
    engine.backward(engine(**batch).loss)
    engine.step()
    state, alone = engine._zero3_consolidated_16bit_state_dict(), build("lora")
    everything = [state]
    torch.distributed.broadcast_object_list(everything)
    alone.load_state_dict(everything[0])
    whole: Any = alone.merge_and_unload()
    expected = {name: value.detach() for name, value in whole.named_parameters()}
    found: dict[str, Weights] = {}

    def shown() -> Weights:
        inside = ((name, param.data) for name, param in model.named_parameters())
        return {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): (
                value.full_tensor() if isinstance(value, DTensor) else value.clone()
            )
            for name, value in inside
            if "lora_" not in name
        }

    with torch.no_grad():
        loss = engine(**batch).loss.item()
        for name, context in (
            ("read", zero.GatheredWhenRead(model)),
            ("gathered", zero.GatheredParameters(model.parameters())),
        ):
            with context:
                model.merge_adapter()
                found[name] = shown()
                model.unmerge_adapter()
        assert engine(**batch).loss.item() == pytest.approx(loss, rel=1e-6)
        with pytest.raises(UsageError, match="safe_merge=True"):
            model.base_model.model.model.layers[0].mlp.experts.merge(safe_merge=True)
        if stage < 3:
            model.merge_adapter()
            assert engine(**batch).loss.item() == pytest.approx(loss, rel=1e-6)
            unloaded = model.merge_and_unload()
            assert unloaded(**batch).loss.item() == pytest.approx(loss, rel=1e-6)
            found["unloaded"] = shown()
    engine.destroy()
    return {name: (weights, expected) for name, weights in found.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_merge_has_the_bits_of_one_in_the_whole_model(stage):
    for found in run_on(2, merged, stage):
        assert len(found) == (3 if stage < 3 else 2)
        for kind, (weights, expected) in found.items():
            assert weights.keys() == expected.keys(), kind
            for name, value in expected.items():
                assert torch.equal(weights[name], value), (kind, name)


# -- what is sent


def moved(rank: int, world_size: int, stage: int) -> tuple[int, int]:
    """The bytes that a rank sends in a step, and those that it should."""
    engine = start(build("mixtral"), configuration(world_size, 2, stage=stage))
    ids = batches("llama", 1)[0]["input_ids"][rank::world_size]
    chosen: list[list[int]] = []
    for layer in engine.module.model.layers:
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, given: chosen.append(given[1].flatten().tolist())
        )
    for _ in range(2):  # in the first one, ranks agree on an order
        before = Counter(MOVED)
        chosen.clear()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    place, experts = rank % 2, EXPERTS // 2
    away = sum(index // experts != place for layer in chosen for index in layer)
    of_ranks = engine.comm.control("tokens").exchange(lambda: away)
    # Each token goes there and back, and so do the gradients; each rank sends the results of those
    # of its neighbour. Besides, there are numbers of tokens.
    expected = 2 * (away + of_ranks[rank ^ 1]) * WIDTH * 4 + len(chosen) * experts * 8
    for group in engine.groups:
        ranks = world_size // 2 if "experts" in group.name else world_size
        assert group.comm.shard_group.size == ranks
        # Reduced, and gathered for forward and backward, or after the step. The embedding's
        # backward does without it, and the head's comes right after its forward.
        is_at_end = group.name in ("model.embed_tokens.weight", "lm_head.weight")
        times = 2 if group.persistent or is_at_end else 3
        expected += times * group.layout.shard_numel * 4 * (ranks - 1)
    assert len(engine.module.model.layers[0].mlp.experts.down_proj.to_local()) == experts
    return MOVED[NETWORK] - before[NETWORK], expected


@pytest.mark.parametrize(("stage", "ranks"), [(2, 2), (3, 2), (3, 4)])
def test_only_tokens_travel(stage, ranks):
    for found, expected in run_on(ranks, moved, stage):
        assert found == expected


# -- refusals


def refused(rank: int, world_size: int) -> list[str]:
    def message(model: nn.Module, size: int = 2, **keys: Any) -> str:
        config = configuration(world_size, size)
        for section, value in keys.items():
            config[section] = config.get(section, {}) | value if isinstance(value, dict) else value
        with pytest.raises(UsageError) as found:
            start(model, config)
        return str(found.value)

    divided = build("mixtral")
    start(divided, configuration(world_size, 2)).destroy()
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=8))
    odd = MixtralForCausalLM(MixtralConfig(intermediate_size=INNER, num_local_experts=5, **MIXTURE))
    zero_keys: list[dict[str, Any]] = [
        {"stage": 3, "mics_shard_size": 1},
        {"zero_quantized_weights": True},
        {"zero_quantized_gradients": True},
    ]
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
    engine = start(build("mixtral"), configuration(world_size, 2, stage=3))
    copied = deepcopy(engine.module)  # an average of weights begins with one
    assert [each.shape for each in copied.parameters()] != []
    experts = engine.module.model.layers[0].mlp.experts.down_proj
    with pytest.raises(UsageError) as of_writer, zero.GatheredParameters(experts, modifier_rank=0):
        pass
    engine.destroy()
    with pytest.raises(UsageError) as of_muon:
        zero.initialize(model=build("mixtral"), config=configuration(world_size, 2) | muon)
    return [
        message(build("mixtral"), 3),
        message(llama),
        message(odd),
        message(adapted(build("gpt-oss"), "mlp.experts.down_proj_bias")),
        message(divided, 1),
        message(build("mixtral"), sequence_parallel_size=2),
        message(build("mixtral"), on_out_of_memory="adapt"),
        *(message(build("mixtral"), zero_optimization=keys) for keys in zero_keys),
        str(of_muon.value),
        str(of_writer.value),
    ]


def test_refusals_name_the_key():
    expected = [
        "expert_parallel.autoep_size: 3 does not divide the number of ranks, 2",
        "LlamaForCausalLM has no ep_plan",
        "2 ranks do not divide the 5 experts of 'model.layers.0.mlp.experts.gate_up_proj'",
        "'model.layers.0.mlp.experts' is a ParamWrapper with",
        "the model's experts are divided over 2 ranks",
        "sequence_parallel_size",
        "on_out_of_memory",
        "zero_optimization.mics_shard_size",
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_gradients",
        "updates whole tensors",
        "each rank has a part of 'model.layers.0.mlp.experts.down_proj'",
    ]
    for found in run_on(2, refused):
        for text, part in zip(found, expected, strict=True):
            assert part in text


def refused_codes(rank: int, world_size: int) -> list[str]:
    from zero.integrations.hf.quantized_experts import QuantizedExperts

    def of_eight_bits(param: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(param.to(torch.float8_e4m3fn), requires_grad=False)

    def in_four_bits(param: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(QuantizedExperts.of(param, "nf4", False), requires_grad=False)

    messages, sizes = [], MIXTURE | {"intermediate_size": 1, "num_local_experts": 2}
    for change in (of_eight_bits, in_four_bits):
        model = MixtralForCausalLM(MixtralConfig(**sizes))
        experts = model.model.layers[1].mlp.experts
        experts.down_proj = change(experts.down_proj)
        with pytest.raises(UsageError) as found:
            start(model, configuration(world_size, 2))
        messages.append(str(found.value))
    return messages


def test_codes_that_cannot_be_divided_are_named():
    pytest.importorskip("bitsandbytes")
    for of_eight_bits, in_four_bits in run_on(2, refused_codes):
        name = "expert_parallel.autoep_size: 'model.layers.1.mlp.experts.down_proj' is quantized"
        assert f"{name} (Parameter of torch.float8_e4m3fn)" in of_eight_bits
        assert f"{name}, and weights of two of 2 parts share a scale" in in_four_bits


# -- a rank that does not come


def hangs(rank: int, world_size: int) -> None:
    config = configuration(world_size, 2) | {"watchdog_timeout": 4}
    engine = start(build("mixtral"), config)
    if rank == 1:
        engine.module.model.layers[1].mlp.experts.register_forward_pre_hook(lambda *_: sleep(60))
    engine(input_ids=batches("llama", 1)[0]["input_ids"])


def test_the_report_of_a_hang_names_the_layer():
    with pytest.raises(
        RuntimeError, match=r"all-to-all of tokens of model\.layers\.1\.mlp\.experts"
    ):
        run_on(2, hangs)
