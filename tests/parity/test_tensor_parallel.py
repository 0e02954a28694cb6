"""Tensor parallelism against plain torch in one process on the same global batches."""

from __future__ import annotations

import re
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

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
from tests.parity.models import ROWS, VOCABULARY, batches, small, start, t5
from tests.processes import run_on
from tests.releases import needs
from zero.errors import UsageError
from zero.integrations.deepspeed.finder import FacadeModule

pytestmark = needs("transformers", "5.23", "it does not shard a model that exists by its plan")

STEPS, ACCUMULATION, CLIP = 3, 3, 0.2
NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}


class Layers(nn.Module):
    """Two linear layers and a norm, in which torch's own styles cut the tokens too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 40)
        self.narrow = nn.Linear(40, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.narrow(self.wide(self.norm(self.embedding(input_ids))).relu())
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Planned(Layers):
    """A model that is not transformers', with a plan in its configuration."""

    def __init__(self) -> None:
        super().__init__()
        plan = {"wide": "colwise", "narrow": "rowwise", "blocks.*.0": "colwise"}
        plan |= {"blocks.*.2": "rowwise", "head": "colwise_gather_output"}
        self.config = SimpleNamespace(base_model_tp_plan=plan)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)) for _ in range(2)]
        )

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(input_ids))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = self.narrow(self.wide(hidden).relu())
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def build(name: str) -> nn.Module:
    torch.manual_seed(7)
    if name == "layers":
        return Layers()
    if name == "planned":
        return Planned()
    if name == "mixtral":
        return small("mixtral", intermediate_size=32, num_local_experts=4)
    # Two ranks do not divide the vocabulary.
    kind = "qwen3" if name == "qwen3" else "llama"
    return small(kind, intermediate_size=36, tie_word_embeddings=name == "tied llama")


def cut_by_torch(model: nn.Module, size: int) -> None:
    """Cut `Layers` by torch's styles.

    The norm works on a part of the tokens, so its gradient is a sum over ranks.
    """
    shape = torch.distributed.get_world_size() // size, size
    mesh = init_device_mesh(
        zero.comm.world.compute_device().type, shape, mesh_dim_names=("dp", "tp")
    )
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
    return [
        {key: value[:, :length] for key, value in batch.items()}
        for batch in batches("llama", STEPS)
    ]


def trained(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[Curve]:
    found = []
    for name, sections in cases:
        config = ds_config(accumulation=ACCUMULATION, clip=CLIP, **sections)
        with zero.Init(config_dict_or_path=config, enabled=name == "llama under Init"):
            model = build(name)
        whole = sum(param.numel() for param in model.parameters())
        embedding = next(model.parameters()).numel()
        config["train_micro_batch_size_per_gpu"] = ROWS // ACCUMULATION // (world_size // 2)
        if name == "layers":
            cut_by_torch(model, 2)
        else:
            config["tensor_parallel"] = {"autotp_size": 2}
        engine = start(model, config)
        sizes = engine.comm.world_size, engine.comm.job.world_size
        assert sizes == (world_size // 2, world_size)
        before = engine.comm.elements["all_gather"]
        found.append(train_zero(engine, data_of(name)))
        if name == "llama":
            # Each rank has half of all but the norms, and at stage 0 no more than that is cut.
            cut = sum(each.numel() for each in model.parameters() if hasattr(each, "full_tensor"))
            own = whole - cut + cut // 2
            masters = sum(shard.master.numel() for shard in engine.optimizer.shards.values())
            shared_by = 1 if config["zero_optimization"]["stage"] == 0 else engine.comm.world_size
            assert masters == pytest.approx(own / shared_by, rel=0.02)
            gathered = engine.comm.elements["all_gather"] - before
            if config["zero_optimization"]["stage"] == 3 and world_size == 4:
                # In each forward and each backward, but for the embedding: its backward needs no
                # values. At the end the weights are gathered once more.
                passes = ACCUMULATION * STEPS * (2 * own - own * embedding / whole)
                assert gathered == pytest.approx(passes + own, rel=0.03), (gathered, passes, own)
        engine.destroy()
    return found


def compare(of_ranks: list[list[Curve]], cases: list[tuple[str, dict[str, Any]]]) -> None:
    for number, (name, _) in enumerate(cases):
        curves = [curves[number] for curves in of_ranks]
        for first, second in zip(curves[::2], curves[1::2], strict=True):
            assert first.losses == second.losses and first.norms == second.norms
        found, expected = together(curves[::2]), plain(name)
        assert min(found.norms) > CLIP, "clipping must be at work"
        assert relative(found.mean_losses(), expected.mean_losses()) < 1e-6, name
        assert relative(found.norms, expected.norms) < 1e-6, name
        assert found.weights.keys() == expected.weights.keys()
        for key, value in expected.weights.items():
            assert torch.allclose(found.weights[key], value, rtol=0, atol=1e-5), key


CASES_ON_FOUR = [
    *(("llama", {"stage": stage} | NOTHING_PERSISTS) for stage in range(4)),
    ("llama under Init", NOTHING_PERSISTS),
    ("tied llama", {}),
    ("qwen3", NOTHING_PERSISTS),
    ("mixtral", {"stage3_param_persistence_threshold": 0}),  # experts are cut in two blocks
    ("layers", NOTHING_PERSISTS),
    ("planned", NOTHING_PERSISTS),
]
CASES_ON_TWO = [
    ("planned", {"stage": 1}),
    ("llama", {"stage": 3, "activation_checkpointing": {"batch_slices": 2}}),
]


@pytest.mark.parametrize(("ranks", "cases"), [(4, CASES_ON_FOUR), (2, CASES_ON_TWO)])
def test_losses_norms_and_weights_are_those_of_plain_torch(ranks, cases):
    compare(run_on(ranks, trained, cases), cases)


# -- refusals


def refused(rank: int, world_size: int) -> None:
    def says(
        text: str, model: nn.Module | str, make: Any = adamw, mesh: Any = None, **sections: Any
    ) -> None:
        model = build(model) if isinstance(model, str) else model
        config = ds_config() | {"tensor_parallel": {"autotp_size": 2}} | sections
        optimizer = make(one_group(trainable(model)))
        with pytest.raises(UsageError, match=re.escape(text)):
            zero.initialize(model=model, optimizer=optimizer, config=config, mesh=mesh)

    three_heads = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    odd = small("llama", **three_heads)
    tied, unknown = build("planned"), build("planned")
    tied.head.weight = tied.embedding.weight
    unknown.config.base_model_tp_plan = {"wide": "column"}
    shards = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    exchanged = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "shard"))
    adafactor = partial(torch.optim.Adafactor, lr=1e-2)
    says("2 does not divide the model's num_attention_heads, 3", odd)
    says("T5ForConditionalGeneration has no tp_plan", t5())
    three = {"autotp_size": 3}
    says("3 does not divide the number of ranks, 2", "llama", tensor_parallel=three)
    says("Adafactor updates whole tensors, and some of them are divided", "llama", adafactor)
    says("autotp_size is 2, and the mesh is {'shard': 2}", "llama", mesh=shards)
    says("the dimensions are ('tp', 'shard')", "llama", mesh=exchanged)
    both = "sequence_parallel_size is 2, and the mesh {'shard': 1, 'tp': 2}: give one"
    says(both, "llama", sequence_parallel_size=2)
    says("plan has the style 'column' for 'wide.weight'; transformers has", unknown)
    says("'embedding.weight' is tied to a weight that the plan names", tied)


def test_refusals_name_the_numbers():
    run_on(2, refused)


def by_deepspeeds_names(rank: int, world_size: int) -> list[tuple]:
    groups = FacadeModule("deepspeed.utils.groups")

    def seen() -> tuple:
        together = torch.tensor(float(rank))
        torch.distributed.all_reduce(together, group=groups._get_data_parallel_group())
        data = groups._get_data_parallel_rank(), groups._get_data_parallel_world_size()
        rank_and_size = "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"
        return *data, *(getattr(groups, name)() for name in rank_and_size), together.item()

    found = [seen()]
    config = ds_config() | {"tensor_parallel": {"autotp_size": 2}}
    engine = start(build("llama"), config)
    found.append(seen())
    assert (engine.autotp_size(), engine.mp_world_size, engine.seq_parallel_group) == (2, 2, None)
    assert engine.data_parallel_group is groups._get_data_parallel_group()
    with pytest.raises(KeyError):
        start(build("llama"), ds_config())
        groups.get_tensor_model_parallel_group()
    return found


def test_samplers_are_told_who_shares_a_batch():
    found = run_on(4, by_deepspeeds_names)
    assert [before for before, _ in found] == [(rank, 4, 0, 1, 6.0) for rank in range(4)]
    expected = [(data, 2, tensor, 2, 2.0 + 2 * tensor) for data in (0, 1) for tensor in (0, 1)]
    assert [after for _, after in found] == expected
