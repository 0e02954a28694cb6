"""Tensor parallelism against plain torch in one process on the same global batches."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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

STEPS, ACCUMULATION, CLIP = 10, 3, 0.2
STAGES = {"stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "stage 3": {"stage": 3}}
NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}
# Two ranks do not divide the vocabulary.
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 36, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.06, "loss_type": "ForCausalLM",
}  # fmt: skip


class Layers(nn.Module):
    """Two linear layers and a norm, in which torch's own styles cut the tokens too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.LayerNorm(16)
        self.wide, self.narrow = nn.Linear(16, 40), nn.Linear(40, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.narrow(self.wide(self.norm(self.embedding(input_ids))).relu())
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    if name == "layers":
        return Layers()
    config, kind = (Qwen3Config, Qwen3ForCausalLM) if name == "qwen3" else (LlamaConfig, LlamaForCausalLM)
    return kind(config(**SIZES, tie_word_embeddings=name == "tied llama")).train()


def start(model: nn.Module, config: dict[str, Any], **arguments: Any) -> zero.ZeroEngine:
    return zero.initialize(model=model, optimizer=adamw(one_group(trainable(model))), config=config, **arguments)[0]


def cut_by_torch(model: nn.Module, size: int) -> None:
    """Cut `Layers` by torch's styles. The norm works on a part of the tokens, so its gradient is a sum over ranks."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size() // size, size), mesh_dim_names=("dp", "tp"))
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "wide": ColwiseParallel(input_layouts=Shard(1)),
        "narrow": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)


@cache
def plain(name: str) -> Curve:
    return run_on(1, _plain, name)[0]


def _plain(rank: int, world_size: int, name: str) -> Curve:
    return train_plain(build(name), data_of(name), CLIP)


def data_of(name: str) -> list[Batch]:
    """The batches; torch's styles need a number of tokens that the ranks divide."""
    length = 8 if name == "layers" else None
    return [{key: value[:, :length] for key, value in batch.items()} for batch in batches("llama", STEPS)]


def trained(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[Curve]:
    found = []
    for name, sections in cases:
        model = build(name)
        config = ds_config(accumulation=ACCUMULATION, clip=CLIP, **sections)
        config["train_micro_batch_size_per_gpu"] = ROWS // ACCUMULATION // (world_size // 2)
        if name == "layers":
            cut_by_torch(model, 2)
        else:
            config["tensor_parallel"] = {"autotp_size": 2}
        engine = start(model, config)
        assert engine.comm.world_size == world_size // 2 and engine.comm.job.world_size == world_size
        found.append(train_zero(engine, data_of(name)))
        engine.destroy()
    return found


def compare(of_ranks: list[list[Curve]], cases: list[tuple[str, dict[str, Any]]]) -> None:
    for number, (name, _) in enumerate(cases):
        curves = [curves[number] for curves in of_ranks]
        for first, second in zip(curves[::2], curves[1::2], strict=True):
            assert first.losses == second.losses and first.norms == second.norms, "ranks of one mesh differ"
        found, expected = together(curves[::2]), plain(name)
        assert min(found.norms) > CLIP, "clipping must be at work"
        assert relative(found.mean_losses(), expected.mean_losses()) < 1e-6, name
        assert relative(found.norms, expected.norms) < 1e-6, name
        assert found.weights.keys() == expected.weights.keys()
        for key, value in expected.weights.items():
            assert torch.allclose(found.weights[key], value, rtol=0, atol=1e-5), key


CASES_ON_FOUR = [
    *(("llama", case | NOTHING_PERSISTS) for case in STAGES.values()),
    ("tied llama", {}),
    ("qwen3", NOTHING_PERSISTS),
    ("layers", NOTHING_PERSISTS),
]
CASES_ON_TWO = [("llama", {"stage": 3}), ("qwen3", {"stage": 1}), ("layers", {"stage": 0})]


@pytest.mark.parametrize(("ranks", "cases"), [(4, CASES_ON_FOUR), (2, CASES_ON_TWO)])
def test_losses_norms_and_weights_are_those_of_plain_torch(ranks, cases):
    compare(run_on(ranks, trained, cases), cases)
