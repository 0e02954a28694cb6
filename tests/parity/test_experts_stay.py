"""Experts that stay on their ranks, over data-parallel ranks or those of tensor parallelism,
against plain torch in one process on the same global batches.

Plain torch computes in float64 here (see `tests.parity.models.in_float64`)."""

from __future__ import annotations

import re
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
from transformers import AutoModelForCausalLM, MixtralForCausalLM
from transformers.distributed import DistributedConfig

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
    small,
    start,
)
from tests.processes import run_on
from zero.checkpoint.models import consolidate
from zero.comm.traffic import MOVED, NETWORK
from zero.errors import UsageError
from zero.integrations.deepspeed.tensor import tp_model_init
from zero.slicing import blocks

pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="transformers has it since 5.22"
)

STEPS, EXPERTS = 3, 8
CPU = {"device": "cpu"}
SLICES = {"batch_slices": 3}


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    sizes = MIXTURE | {"intermediate_size": INNER}
    if name == "olmoe":
        return small("olmoe", **sizes, num_experts=EXPERTS, head_dim=6)
    if name == "gpt-oss":
        return small("gpt_oss", **sizes, num_local_experts=EXPERTS)
    if name == "deepseek":
        experts = {"moe_intermediate_size": INNER, "n_routed_experts": EXPERTS, "n_group": 2}
        ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
        sizes |= {"v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 4, "topk_group": 1}
        return small("deepseek_v3", **sizes | experts | ranks, first_k_dense_replace=1)
    if name == "lora":
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = mixture("mixtral", EXPERTS)
        return adapted(model, *names, init_lora_weights=False, lora_alpha=64)
    return mixture(name, EXPERTS)


def adapted(model: nn.Module, *parameters: str, **keys: Any) -> nn.Module:
    lora = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=list(parameters), **keys)
    return get_peft_model(model, lora)


def configuration(
    world_size: int, size: int, accumulation: int = 1, tensor: int = 1, **keys: Any
) -> dict[str, Any]:
    config = ds_config(accumulation=accumulation, clip=CLIP, **NOTHING_PERSISTS | keys)
    config["train_micro_batch_size_per_gpu"] = ROWS // accumulation // (world_size // tensor)
    return config | {
        "tensor_parallel": {"autotp_size": tensor},
        "expert_parallel": {"enabled": size > 1, "autoep_size": size},
    }


@cache
def plain(name: str) -> Curve:
    return run_on(1, _plain, name)[0]


def _plain(rank: int, world_size: int, name: str) -> Curve:
    return in_float64(build(name), batches("llama", STEPS))


def trained(rank: int, world_size: int, cases: list[tuple[str, str, int, dict]]) -> list[Curve]:
    found = []
    for name, implementation, size, keys in cases:
        model, keys = build(name), dict(keys)
        cut_before = keys.pop("cut_before", False)
        model.set_experts_implementation(implementation)
        if (reentrant := keys.pop("reentrant", None)) is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        config = configuration(world_size, size, **keys)
        if cut_before:  # as transformers calls it
            model = tp_model_init(model, 2, config=config)
        engine = start(model, config)
        if "tensor" in keys:
            own = EXPERTS // size * 3 * WIDTH * INNER
            groups = [g for g in engine.groups if any("experts" in name for name in g.param_names)]
            assert [each.layout.numel for each in groups] == [own] * {"qwen3": 1}.get(name, 2)
        found.append(train_zero(engine, batches("llama", STEPS)))
        engine.destroy()
    return found


def compare(found: Curve, expected: Curve, within: float = 2e-6) -> None:
    assert min(found.norms) > CLIP, "clipping must be at work"
    assert relative(found.mean_losses(), expected.mean_losses()) < 1e-6
    assert relative(found.norms, expected.norms) < 1e-6
    assert found.weights.keys() == expected.weights.keys()
    for key, value in expected.weights.items():
        torch.testing.assert_close(found.weights[key], value.float(), rtol=0, atol=within, msg=key)


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
    ("mixtral", "grouped_mm", 2, {"stage": 3, "reentrant": True, "offload_param": CPU}),
    ("one-sided", "grouped_mm", 4, {"stage": 0, "reentrant": True}),
]


MESH = {"tensor": 2, "accumulation": 3}
IN_MESHES = [
    ("mixtral", "eager", 2, {"stage": 0} | MESH),
    ("mixtral", "eager", 2, {"stage": 3, "cut_before": True} | MESH),
    ("qwen3", "grouped_mm", 2, {"stage": 1} | MESH),
    ("mixtral", "batched_mm", 2, {"stage": 2, "offload_optimizer": CPU} | MESH),
    ("qwen3", "eager", 2, {"stage": 3} | MESH),
    ("one-sided", "eager", 2, {"stage": 3} | MESH),
    ("mixtral", "grouped_mm", 2, {"stage": 3, "offload_param": CPU} | MESH),
]


@pytest.mark.parametrize(
    ("ranks", "cases"), [(4, ON_FOUR), (2, ON_TWO), (4, IN_MESHES), (2, IN_MESHES[:3])]
)
def test_losses_norms_and_weights_are_those_of_plain_torch(ranks, cases):
    of_ranks = run_on(ranks, trained, cases)
    for number, (name, _, _, keys) in enumerate(cases):
        curves, size = [curves[number] for curves in of_ranks], keys.get("tensor", 1)
        for rank, curve in enumerate(curves):
            assert curve.losses == curves[rank - rank % size].losses, "ranks of one mesh differ"
        compare(together(curves[::size]), plain(name), 1e-5 if size > 1 else 2e-6)


# -- slices of batches that differ


def uneven(rank: int, world_size: int, slices: Any) -> list[float]:
    """The norms of steps in which ranks have different numbers of rows, and one of them a mask."""
    blocks.TOKENS = 16  # so that "auto" makes slices of these small batches
    keys = {"activation_checkpointing": {"batch_slices": slices}} if slices else {}
    engine = start(build("mixtral"), configuration(world_size, 2, stage=3, **keys))
    norms = []
    for batch, rows in zip(batches("llama", 3), ((3, 5), (1, 4), (6, 2)), strict=True):
        ids = batch["input_ids"][: rows[rank]]
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
    first, second = slice(HALF), slice(HALF, None)
    of_one, of_all, of_mesh = (f"{folder}/{name}" for name in ("1", "4", "mesh"))
    for size in (1, 2):  # whether each rank has a part of each expert, or some experts
        config = configuration(4, size, **MESH, stage3_max_live_parameters=0)
        with pytest.raises(UsageError, match="divided over ranks cannot run in slices"):
            start(build("mixtral"), config)
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
        "in a mesh": run(4, 2, second, folder, **MESH),
        "first in a mesh": run(4, 2, first, save=of_mesh, **MESH),
        "from a mesh": run(4, 1, second, of_mesh, stage=2),
        "a part of each expert": run(4, 1, second, of_mesh, stage=1, **MESH),
    }


def resumed_on_two(rank: int, world_size: int, folder: str) -> dict[str, Curve]:
    second = slice(HALF, None)
    return {"on two": run(2, 2, second, folder), "alone": run(2, 1, second, folder)}


def test_checkpoints_resume_with_any_division(tmp_path):
    found = {}
    for ranks, resumed in ((4, resumed_on_four), (2, resumed_on_two)):
        of_ranks = run_on(ranks, resumed, str(tmp_path))
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
    folders["mesh"] = found["first in a mesh"]
    for folder, curve in folders.items():
        out = tmp_path / "consolidated" / folder
        consolidate(tmp_path / folder, out)
        for written in (out, tmp_path / folder):
            model = MixtralForCausalLM.from_pretrained(written)
            for name, value in curve.weights.items():
                assert torch.equal(model.state_dict()[name], value), (folder, name)


def loaded(rank: int, world_size: int, folder: str) -> Curve:
    """transformers itself gives each rank its experts."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2, ep_size=2)
    )
    engine = start(model.train(), configuration(world_size, 2, **MESH))
    return train_zero(engine, batches("llama", STEPS))


def from_the_folder(rank: int, world_size: int, folder: str) -> Curve:
    return in_float64(AutoModelForCausalLM.from_pretrained(folder).train(), batches("llama", STEPS))


def test_a_model_whose_experts_transformers_has_divided(tmp_path):
    build("mixtral").save_pretrained(tmp_path)
    (expected,) = run_on(1, from_the_folder, str(tmp_path))
    compare(run_on(2, loaded, str(tmp_path))[0], expected, 1e-5)


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
        for context in (zero.GatheredWhenRead(model), zero.GatheredParameters(model.parameters())):
            with context:
                model.merge_adapter()
                found[type(context).__name__] = shown()
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


def refused(rank: int, world_size: int, folder: str) -> None:
    def says(text: str, model: nn.Module, size: int = 2, tensor: int = 1, **keys: Any) -> None:
        config = configuration(world_size, size, tensor=tensor)
        for section, value in keys.items():
            config[section] = config.get(section, {}) | value if isinstance(value, dict) else value
        with pytest.raises(UsageError, match=re.escape(text)):
            start(model, config)

    divided, whole = build("mixtral"), build("mixtral")
    start(divided, configuration(world_size, 2)).destroy()
    odd = small("mixtral", **MIXTURE, intermediate_size=INNER, num_local_experts=5)
    biases = adapted(build("gpt-oss"), "mlp.experts.down_proj_bias")
    engine = start(build("mixtral"), configuration(world_size, 2, stage=3))
    copied = deepcopy(engine.module)  # an average of weights begins with one
    assert [each.shape for each in copied.parameters()] != []
    experts = engine.module.model.layers[0].mlp.experts.down_proj
    text = "each rank has a part of 'model.layers.0.mlp.experts.down_proj'"
    with pytest.raises(UsageError, match=text), zero.GatheredParameters(experts, modifier_rank=0):
        pass
    engine.destroy()
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
    with pytest.raises(UsageError, match="updates whole tensors"):
        zero.initialize(model=build("mixtral"), config=configuration(world_size, 2) | muon)
    says("expert_parallel.autoep_size: 3 does not divide the number of ranks, 2", whole, 3)
    says("LlamaForCausalLM has no ep_plan", small("llama"))
    name = "'model.layers.0.mlp.experts"
    says(f"2 does not divide the experts of {name}.gate_up_proj', 5", odd)
    says(f"{name}' is a ParamWrapper with", biases)
    says("the model's experts are divided over 2 ranks", divided, 1)
    says("sequence_parallel_size", build("mixtral"), sequence_parallel_size=2)
    says("on_out_of_memory", build("mixtral"), on_out_of_memory="adapt")
    for key in ("mics_shard_size", "zero_quantized_weights", "zero_quantized_gradients"):
        keys = {"stage": 3, key: 1 if key == "mics_shard_size" else True}
        says(f"zero_optimization.{key}", build("mixtral"), zero_optimization=keys)
    # With tensor parallelism
    if rank == 0:
        build("mixtral").save_pretrained(folder)
    torch.distributed.barrier()
    over_data = DistributedConfig(fsdp_size=2, ep_size=2)
    by_fsdp = MixtralForCausalLM.from_pretrained(folder, distributed_config=over_data)
    in_parts = tp_model_init(build("mixtral"), 2)
    says("set tensor_parallel.autotp_size to 3, or delete it", build("mixtral"), 3, tensor=2)
    says("each process has a part of each expert", in_parts, tensor=2)
    says("fully_shard has sharded", by_fsdp, tensor=2)


def test_refusals_name_the_key(tmp_path):
    run_on(2, refused, str(tmp_path))


def refused_codes(rank: int, world_size: int) -> None:
    from zero.integrations.hf.quantized_experts import QuantizedExperts

    sizes = MIXTURE | {"intermediate_size": 1, "num_local_experts": 2}
    shared = ", and weights of two of 2 parts share a scale"
    for change, text in (
        (lambda param: param.to(torch.float8_e4m3fn), r" \(Parameter of torch.float8_e4m3fn\)"),
        (lambda param: QuantizedExperts.of(param, "nf4", False), shared),
    ):
        model = small("mixtral", **sizes)
        experts = model.model.layers[1].mlp.experts
        experts.down_proj = nn.Parameter(change(experts.down_proj), requires_grad=False)
        name = "expert_parallel.autoep_size: 'model.layers.1.mlp.experts.down_proj' is quantized"
        with pytest.raises(UsageError, match=name + text):
            start(model, configuration(world_size, 2))


def test_codes_that_cannot_be_divided_are_named():
    pytest.importorskip("bitsandbytes")
    run_on(2, refused_codes)


# -- a rank that does not come


def hangs(rank: int, world_size: int) -> None:
    config = configuration(world_size, 2) | {"watchdog_timeout": 4}
    engine = start(build("mixtral"), config)
    if rank == 1:
        engine.module.model.layers[1].mlp.experts.register_forward_pre_hook(lambda *_: sleep(60))
    engine(input_ids=batches("llama", 1)[0]["input_ids"])


def test_the_report_of_a_hang_names_the_layer():
    said = r"all-to-all of tokens of model\.layers\.1\.mlp\.experts"
    with pytest.raises(RuntimeError, match=said):
        run_on(2, hangs)
