"""Sequences that ranks share: own loops against plain torch in one process, which sees each
micro-batch whole.

The batches have what real ones have: lengths that nothing divides, prompts without labels (so that
a rank may have no token that counts), padding on both sides, and packed sequences. The micro-batch
is larger than one."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero
from tests.dist.training import Curve, ds_config, relative, train_plain
from tests.parity.models import VOCABULARY, small
from tests.processes import run_on
from tests.releases import needs
from zero.errors import UsageError
from zero.integrations.deepspeed.finder import FacadeModule
from zero.parallel.sequence import MicroBatches, current_group

STEPS, ACCUMULATION, ROWS = 4, 2, 3
CLIP = 1.0
Batch = dict[str, torch.Tensor]


class Case(NamedTuple):
    stage: int
    attention: str
    key_value_heads: int = 2
    size: int = 2
    window: int | None = None
    shard_group: int = -1


def build(case: Case) -> Any:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "hidden_size": 24, "intermediate_size": 37,
        "num_attention_heads": 12, "num_key_value_heads": case.key_value_heads, "head_dim": 2,
        "max_position_embeddings": 32, "pad_token_id": 0, "use_cache": False,
        "attn_implementation": case.attention,
    }  # fmt: skip
    if case.window is None:
        return small("llama", **sizes)
    return small("mistral", **sizes, sliding_window=case.window)


def micro_batch(number: int) -> Batch:
    """One of four kinds: plain, with prompts, padded, packed."""
    generator = torch.Generator().manual_seed(number)
    kind, length = number % 4, 9 + number % 5
    ids = torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == 1:
        batch["labels"][:, : length - 3] = -100
    if kind == 2:
        mask = torch.ones_like(ids)
        mask[1, -4:] = 0
        if number % 8 == 2:
            mask[0, :3] = 0
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        # After padding, which attends to nothing, and so predicts at random.
        batch["labels"][0, 3] = -100
    if kind == 3:
        first = torch.tensor([4, 6, length])[:, None]
        positions = torch.arange(length).expand(ROWS, -1)
        batch["position_ids"] = torch.where(positions < first, positions, positions - first)
    return batch


def batches_of_rank(rank: int, world_size: int, case: Case) -> list[Batch]:
    """What the data loader of one rank gives: every `world_size`-th of all."""
    return [
        micro_batch(number)
        for number in range(rank, STEPS * ACCUMULATION * world_size // case.size, world_size)
    ]


def share(rank: int, world_size: int, cases: list[Case]) -> list[tuple[list[float], list[float]]]:
    return [share_one(rank, world_size, case) for case in cases]


def share_one(rank: int, world_size: int, case: Case) -> tuple[list[float], list[float]]:
    model = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zero_keys = {"stage3_param_persistence_threshold": 30, "mics_shard_size": case.shard_group}
    config = ds_config(stage=case.stage, clip=CLIP, accumulation=ACCUMULATION, **zero_keys)
    config |= {"sequence_parallel_size": case.size, "train_micro_batch_size_per_gpu": ROWS}
    config.pop("train_batch_size", None)
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config)
    assert engine.train_batch_size() == ROWS * ACCUMULATION * world_size // case.size
    losses, norms = [], []
    for batch in MicroBatches(batches_of_rank(rank, world_size, case), current_group()):
        loss = engine(**batch, labels=batch["shift_labels"]).loss
        loss = current_group().mean_loss(loss, batch["shift_labels"])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if engine.was_step_applied():
            norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return losses, norms


def alone(
    rank: int, world_size: int, ranks: int, case: Case
) -> tuple[list[list[float]], list[float]]:
    """Plain torch on the same global batches.

    The losses of each micro-step, one for each group of ranks.
    """
    model = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loaders = [batches_of_rank(each, ranks, case) for each in range(ranks)]
    losses, norms, groups = [], [], ranks // case.size
    for step in range(STEPS * ACCUMULATION):
        turn, owner = divmod(step, case.size)
        found = [model(**loaders[group * case.size + owner][turn]).loss for group in range(groups)]
        (sum(found) / groups / ACCUMULATION).backward()
        losses.append([loss.item() for loss in found])
        if (step + 1) % ACCUMULATION == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


@cache
def reference(ranks: int, case: Case) -> tuple[list[list[float]], list[float]]:
    return run_on(1, alone, ranks, case)[0]


TWO_RANKS = [*(Case(stage, "sdpa") for stage in range(4)), Case(1, "eager"), Case(3, "eager")]
TWO_RANKS += [Case(3, "eager", key_value_heads=3), Case(2, "sdpa", window=4)]
FOUR_RANKS = [
    Case(3, "sdpa"),
    Case(1, "eager", key_value_heads=1),
    Case(3, "sdpa", key_value_heads=6, size=4),
    Case(3, "sdpa", shard_group=2),
    Case(2, "sdpa", key_value_heads=6, size=4, shard_group=2),
]


@needs("transformers", "5.6", "its masks take other arguments")
@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)], ids=["2 ranks", "4 ranks"]
)
def test_losses_and_norms_are_those_of_one_process(ranks, cases):
    shared = run_on(ranks, share, cases)
    for number, case in enumerate(cases):
        losses, norms = reference(ranks, case._replace(stage=0, shard_group=-1))
        assert max(norms) > CLIP, "clipping must be at work"
        for rank in range(ranks):
            found_losses, found_norms = shared[rank][number]
            expected = [found[rank // case.size] for found in losses]
            assert len(found_norms) == STEPS
            assert relative(found_losses, expected) < 1e-6, case
            assert relative(found_norms, norms) < 1e-6, case


# -- a model that is not transformers'


class Own(nn.Module):
    """A causal language model whose attention is `DistributedAttention` over `group`, if there is
    one.
    """

    def __init__(self, group: Any, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.inputs = nn.Linear(16, 48)
        self.outputs = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)
        self.attention: Any = self.attend
        if group is not None:
            layer = FacadeModule("deepspeed.sequence.layer")
            self.attention = layer.DistributedAttention(self.attend, group, 2, 1)

    @staticmethod
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Any:
        heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale)
        return mixed.transpose(1, 2)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, tokens: int) -> torch.Tensor:
        hidden = self.embedding(ids)
        parts = self.inputs(hidden).view(*ids.shape, 3, self.heads, -1).unbind(2)
        hidden = hidden + self.outputs(self.attention(*parts, scale=0.5).flatten(2))
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.mT, labels, reduction="sum") / tokens


def own_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(number))
    return ids[:, :-1], ids[:, 1:]


def share_own(rank: int, world_size: int, stage: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(3)
    group, _ = dist.new_subgroups(2)
    model = Own(group)
    engine, *_ = zero.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config=ds_config(stage=stage, clip=0.3) | {"train_micro_batch_size_per_gpu": 2},
        mesh_param=(world_size // 2, 2),
    )
    groups = FacadeModule("deepspeed.utils.groups")
    data, piece = divmod(rank, 2)
    assert groups._get_data_parallel_rank() == data
    assert groups._get_data_parallel_world_size() == world_size // 2
    assert groups._get_sequence_parallel_rank() == piece
    assert dist.get_world_size(engine.seq_parallel_group) == 2
    assert groups.get_tensor_model_parallel_world_size() == 1
    assert engine.train_batch_size() == world_size
    losses, norms = [], []
    for step in range(STEPS):
        ids, labels = own_batch(step * world_size // 2 + data)
        own = (each.chunk(2, 1)[piece] for each in (ids, labels))
        loss = engine(*own, ids.numel())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    with pytest.raises(UsageError, match="2 ranks do not divide dimension 2"):
        Own(group, heads=1)(ids, labels, 1)
    with pytest.raises(UsageError, match="whose product is the number of ranks"):
        zero.initialize(model=Own(group), config=ds_config(), mesh_param=(3, 2))
    return losses, norms


def own_alone(rank: int, world_size: int, groups: int) -> Curve:
    torch.manual_seed(3)
    steps = [[own_batch(step * groups + data) for data in range(groups)] for step in range(STEPS)]
    data = []
    for batches in steps:
        ids, labels = (torch.cat(each) for each in zip(*batches, strict=True))
        data.append({"ids": ids, "labels": labels, "tokens": torch.tensor(ids.numel())})
    return train_plain(Own(None), data, 0.3, make=partial(torch.optim.SGD, lr=0.5))


@pytest.mark.parametrize(("ranks", "stage"), [(2, 1), (4, 3)])
def test_a_model_with_distributed_attention_trains_as_one_process_does(ranks, stage):
    shared, (curve,) = run_on(ranks, share_own, stage), run_on(1, own_alone, ranks // 2)
    parts = [sum(step) / (ranks // 2) for step in zip(*(found for found, _ in shared), strict=True)]
    assert relative(parts, curve.mean_losses()) < 1e-6
    assert min(curve.norms) > 0.3, "clipping must be at work"
    for _, found in shared:
        assert relative(found, curve.norms) < 1e-6
