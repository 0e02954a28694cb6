"""Expert parallelism against plain torch in one process on the same global batches.

Plain torch computes in float64 here: in fp32, the norms of these models alone are rounded by up to
1.1e-6."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.distributed import DistributedConfig

import zero
from tests.dist.training import (
    Batch,
    Curve,
    adamw,
    ds_config,
    one_group,
    relative,
    together,
    train_plain,
    train_zero,
    trainable,
)
from tests.parity.models import ROWS, VOCABULARY, batches
from tests.processes import run_on
from zero.checkpoint.models import consolidate
from zero.errors import UsageError
from zero.integrations.deepspeed.tensor import tp_model_init

pytest.importorskip(
    "transformers.distributed.expert_parallel", reason="transformers has it since 5.22"
)

STEPS, ACCUMULATION, CLIP = 3, 3, 0.2
EXPERTS, WIDTH, INNER = 6, 24, 16
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 16,
    "initializer_range": 0.06,
    "loss_type": "ForCausalLM",
}  # fmt: skip
NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def build(name: str) -> nn.Module:
    """A small model.

    In "one-sided" all tokens choose the same two experts, so that some ranks have no work.
    """
    torch.manual_seed(7)
    if name == "qwen3":  # the second layer has no experts
        experts = {"moe_intermediate_size": INNER, "num_experts": EXPERTS, "mlp_only_layers": [1]}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(intermediate_size=32, **experts, **SIZES)).train()
    model = MixtralForCausalLM(
        MixtralConfig(intermediate_size=INNER, num_local_experts=EXPERTS, **SIZES)
    ).train()
    if name == "one-sided":
        for layer in model.model.layers:
            nn.init.zeros_(layer.mlp.gate.weight).requires_grad_(False)
    return model


def data() -> list[Batch]:
    return batches("llama", STEPS)


def configuration(world_size: int, tp: int = 2, **keys: Any) -> dict[str, Any]:
    config = ds_config(accumulation=ACCUMULATION, clip=CLIP, **NOTHING_PERSISTS, **keys)
    config["train_micro_batch_size_per_gpu"] = ROWS // ACCUMULATION // (world_size // tp)
    return config | {
        "tensor_parallel": {"autotp_size": tp},
        "expert_parallel": {"enabled": True, "autoep_size": tp},
    }


def start(model: nn.Module, config: dict[str, Any]) -> zero.ZeroEngine:
    return zero.initialize(
        model=model, optimizer=adamw(one_group(trainable(model))), config=config
    )[0]


@cache
def plain(name: str) -> Curve:
    return run_on(1, _plain, name)[0]


def _plain(rank: int, world_size: int, name: str) -> Curve:
    return in_float64(build(name), data())


def in_float64(model: nn.Module, batches: list[Batch]) -> Curve:
    model.double().set_experts_implementation("eager")
    return train_plain(model, batches, CLIP)


def trained(rank: int, world_size: int, cases: list[tuple[str, str, int, dict]]) -> list[Curve]:
    found = []
    for name, implementation, stage, keys in cases:
        model = build(name)
        model.set_experts_implementation(implementation)
        engine = start(model, configuration(world_size, stage=stage, **keys))
        experts = [
            group for group in engine.groups if any("experts" in each for each in group.param_names)
        ]
        assert len(experts) == {"qwen3": 1}.get(name, 2)
        assert all(group.layout.numel == EXPERTS // 2 * 3 * WIDTH * INNER for group in experts)
        found.append(train_zero(engine, data()))
        if name == "one-sided":
            gate = model.model.layers[0].mlp.gate
            with zero.GatheredParameters(gate.parameters()):
                _, _, chosen = gate(torch.randn(5, WIDTH))
            assert len({index // (EXPERTS // 2) for index in chosen.flatten().tolist()}) == 1
        engine.destroy()
    return found


def compare(found: list[Curve], expected: Curve) -> None:
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert first.losses == second.losses and first.norms == second.norms, (
            "ranks of one mesh differ"
        )
    curve = together(found[::2])
    assert min(curve.norms) > CLIP, "clipping must be at work"
    assert relative(curve.mean_losses(), expected.mean_losses()) < 1e-6
    assert relative(curve.norms, expected.norms) < 1e-6
    assert curve.weights.keys() == expected.weights.keys()
    for key, value in expected.weights.items():
        torch.testing.assert_close(curve.weights[key], value.float(), rtol=0, atol=1e-5, msg=key)


CASES = [
    ("mixtral", "eager", 0, {}),
    ("qwen3", "grouped_mm", 1, {}),
    ("mixtral", "batched_mm", 2, {"offload_optimizer": {"device": "cpu"}}),
    ("qwen3", "eager", 3, {}),
    ("one-sided", "eager", 3, {}),
    ("mixtral", "grouped_mm", 3, {"offload_param": {"device": "cpu"}}),
]


@pytest.mark.parametrize(("ranks", "cases"), [(4, CASES), (2, CASES[:2])])
def test_losses_norms_and_weights_are_those_of_plain_torch(ranks, cases):
    of_ranks = run_on(ranks, trained, cases)
    for number, (name, *_) in enumerate(cases):
        compare([curves[number] for curves in of_ranks], plain(name))


def by_the_trainer(rank: int, world_size: int) -> Curve:
    config = configuration(world_size, stage=3)
    model = tp_model_init(
        build("mixtral"), 2, config=config
    )  # as transformers' `deepspeed_init` calls it
    return train_zero(start(model, config), data())


def test_the_trainer_cuts_the_model_before_the_engine_is_made():
    compare(run_on(2, by_the_trainer), plain("mixtral"))


# -- checkpoints, and models that are saved and loaded

HALF = 2


def resumed(rank: int, world_size: int, folder: str) -> dict[str, Curve]:
    """Runs of `STEPS` steps: without a break, and with one, after which experts are shared
    otherwise.
    """

    def run(
        first: int, last: int, load: str = "", save: str = "", tp: int = 2, **keys: Any
    ) -> Curve:
        config = configuration(world_size, tp, stage=keys.pop("stage", 3)) | keys
        engine = start(build("mixtral"), config)
        if load:
            engine.load_checkpoint(folder, load)
        curve = train_zero(engine, data()[first:last])
        if save:
            engine.save_checkpoint(folder, save)
            engine.save_16bit_model(str(Path(folder, "model")))
        engine.destroy()
        return curve

    with pytest.raises(
        UsageError, match="experts that are divided over ranks cannot run in slices"
    ):
        start(build("mixtral"), configuration(world_size, stage3_max_live_parameters=0))
    return {
        "whole": run(0, 2 * HALF),
        "first half": run(0, HALF, save="half"),
        "as before": run(HALF, 2 * HALF, load="half"),
        "a part of each expert": run(
            HALF, 2 * HALF, load="half", stage=1, expert_parallel={"enabled": False}
        ),
        "not shared": run(HALF, 2 * HALF, load="half", tp=1, stage=2),
    }


def loaded(rank: int, world_size: int, folder: str) -> Curve:
    """transformers itself gives each rank its experts."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2, ep_size=2)
    )
    engine = start(model.train(), configuration(world_size))
    curve = train_zero(engine, data()[HALF:])
    engine.destroy()
    return curve


def continued(rank: int, world_size: int, folder: str) -> Curve:
    return in_float64(AutoModelForCausalLM.from_pretrained(folder).train(), data()[HALF:])


def test_checkpoints_and_models_are_whole(tmp_path):
    of_ranks = run_on(4, resumed, str(tmp_path))
    found = {
        name: together(
            [curves[name] for curves in (of_ranks if name == "not shared" else of_ranks[::2])]
        )
        for name in of_ranks[0]
    }
    whole = found["whole"]
    assert (
        found["as before"].losses == whole.losses[HALF:]
        and found["as before"].norms == whole.norms[HALF:]
    )
    for name in ("a part of each expert", "not shared"):
        assert relative(found[name].mean_losses(), whole.mean_losses()[HALF:]) < 1e-6, name
        assert relative(found[name].norms, whole.norms[HALF:]) < 1e-6, name
    consolidate(tmp_path / "half", tmp_path / "consolidated")
    for folder in (tmp_path / "consolidated", tmp_path / "model"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        for name, value in found["first half"].weights.items():
            assert torch.equal(model.state_dict()[name], value), name
    compare(
        run_on(2, loaded, str(tmp_path / "model")), run_on(1, continued, str(tmp_path / "model"))[0]
    )


# -- refusals


def refused(rank: int, world_size: int, folder: str) -> list[str]:
    def message(model: nn.Module, **sections: Any) -> str:
        with pytest.raises(UsageError) as found:
            start(model, configuration(world_size) | sections)
        return str(found.value)

    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, **heads)
    )
    odd = MixtralForCausalLM(MixtralConfig(intermediate_size=INNER, num_local_experts=5, **SIZES))
    in_parts = tp_model_init(build("mixtral"), 2)
    over_data = {"fsdp_size": 2, "ep_size": 2}
    if rank == 0:
        build("mixtral").save_pretrained(folder)
    torch.distributed.barrier()
    return [
        message(build("mixtral"), expert_parallel={"enabled": True, "autoep_size": 3}),
        message(llama),
        message(odd),
        message(in_parts),
        message(
            MixtralForCausalLM.from_pretrained(
                folder, distributed_config=DistributedConfig(**over_data)
            )
        ),
    ]


def test_refusals_name_the_numbers(tmp_path):
    expected = [
        "set tensor_parallel.autotp_size to 3, or delete it",
        "LlamaForCausalLM has no ep_plan",
        "2 ranks do not divide the 5 experts of 'model.layers.0.mlp.experts.gate_up_proj'",
        "each process has a part of each expert",
        "fully_shard has sharded",
    ]
    for found in run_on(2, refused, str(tmp_path)):
        for text, part in zip(found, expected, strict=True):
            assert part in text
