"""The parts of sequence parallelism on two ranks: the exchange, pieces of batches, other attention,
tiles of tokens, and mistakes.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import zero
from tests.dist.toys import messages
from tests.dist.training import ds_config, relative, start
from tests.parity.models import small
from tests.processes import on_ranks, run_on
from zero.errors import UsageError
from zero.integrations.deepspeed.finder import FacadeModule
from zero.parallel.sequence import (
    MicroBatches,
    SequenceGroup,
    attach,
    current_group,
    detach,
    make_group,
    tile_mlps,
    tiled,
    tiled_loss,
)


def llama(**settings: Any) -> Any:
    torch.manual_seed(3)
    return small("llama", **{"hidden_size": 16, "head_dim": 4, "use_cache": False} | settings)


def pieces(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Rank 0's batch has 5 tokens and a mask, rank 1's has 4, positions of its own, and more."""
    ids = torch.arange(5)[None] + 10
    batch: dict[str, Any] = {
        "input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "name": "first",
    }  # fmt: skip
    if rank == 1:
        batch = {
            "input_ids": ids[:, :4] + 10,
            "position_ids": torch.tensor([[0, 1, 0, 1]], dtype=torch.int32),
            "cu_seq_lens_q": torch.tensor([0, 2, 4]),
            "scores": torch.arange(8.0).view(1, 4, 2) / 3,
        }
    loader = MicroBatches([batch], make_group(2))
    assert len(loader) == 2
    return [
        {key: value if key == "name" else value.tolist() for key, value in each.items()}
        for each in loader
    ]


def test_each_rank_gets_its_piece_of_every_batch():
    (first, second), (third, fourth) = run_on(2, pieces)
    assert first == {
        "input_ids": [[10, 11, 12]], "attention_mask": [[1, 1, 1]], "name": "first",
        "position_ids": [[0, 1, 2]], "shift_labels": [[11, 12, 13]],
    }  # fmt: skip
    assert third == {
        "input_ids": [[13, 14, 0]], "attention_mask": [[1, 1, 0]], "name": "first",
        "position_ids": [[3, 4, 5]], "shift_labels": [[14, -100, -100]],
    }  # fmt: skip
    scores = second.pop("scores")[0] + fourth["scores"][0]
    assert scores == (torch.arange(8.0).view(4, 2) / 3).tolist()
    assert second == {"input_ids": [[20, 21]], "position_ids": [[0, 1]]}
    assert fourth["position_ids"] == [[0, 1]]


def single_tokens(rank: int, world_size: int) -> list[Any]:
    """Each piece is one token of two sequences: a tensor whose rows do not lie next to each
    other.
    """
    ids = torch.tensor([[1, 2], [3, 4]]) + 10 * rank
    return [
        batch["input_ids"].tolist() for batch in MicroBatches([{"input_ids": ids}], make_group(2))
    ]


def test_pieces_of_one_token():
    assert run_on(2, single_tokens) == [[[[1], [3]], [[11], [13]]], [[[2], [4]], [[12], [14]]]]


PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]])
seen: list[torch.Tensor] = []


def looking(
    module: torch.nn.Module, *tensors: Any, position_ids: Any = None, **kwargs: Any
) -> tuple:
    """An attention function that reads positions, as flash attention does."""
    seen.append(position_ids)
    return sdpa_attention_forward(module, *tensors, **kwargs)


def loss_of_pieces(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], ranks: SequenceGroup
) -> torch.Tensor:
    batch = next(iter(MicroBatches([batch], ranks)))
    return ranks.mean_loss(model(**batch, labels=batch["shift_labels"]).loss, batch["shift_labels"])


@on_ranks(2)
def test_attention_that_reads_positions_gets_those_of_the_whole_sequence(rank, world_size):
    AttentionInterface.register("looking", looking)
    AttentionMaskInterface.register("looking", sdpa_mask)
    model, ranks = llama(), make_group(2)
    model.config._attn_implementation = "looking"
    ids = torch.randint(97, (2, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids, "position_ids": PACKED}
    expected = model(**batch).loss.item()
    seen.clear()
    attach(model, ranks)
    shared = loss_of_pieces(model, batch, ranks).item()
    detach(model)
    alone = model(**batch).loss.item()
    whole = all(torch.equal(each, PACKED) for each in seen)
    assert whole and len(seen) == 4 and alone == expected and relative([shared], [expected]) < 1e-6


_LAYERS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gemma2": {**_LAYERS, "attn_logit_softcapping": 5.0, "attn_implementation": "eager"},
    "gemma3_text": _LAYERS,
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 3},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4, "moe_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": 8,
        "v_head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4,
    },
}  # fmt: skip


def gradient_norm(model: torch.nn.Module, world_size: int = 1) -> float:
    """Of the mean over ranks."""
    squares = 0.0
    for param in model.parameters():
        gradient, param.grad = torch.zeros_like(param) if param.grad is None else param.grad, None
        if world_size > 1:
            torch.distributed.all_reduce(gradient)
        squares += (gradient / world_size).square().sum().item()
    return squares**0.5


@on_ranks(2)
def test_other_architectures(rank, world_size):
    """Learned positions, sliding windows, chunks, soft caps, experts, latent attention."""
    ranks, found = make_group(2), {}
    ids = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(5))
    for name, settings in MODELS.items():
        torch.manual_seed(1)
        model = small(name, **{"num_key_value_heads": 1, "use_cache": False} | settings)
        # Packed sequences; and padding, so that rank 1 has nothing else of the second sequence.
        mask = torch.ones_like(ids).index_put(
            (torch.tensor(1), torch.arange(3, 8)), torch.tensor(0)
        )
        for kind, more in (
            ("packed", {"position_ids": PACKED}),
            ("padded", {"attention_mask": mask}),
        ):
            batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), **more}
            loss = model(**batch).loss
            loss.backward()
            expected = [loss.item(), gradient_norm(model)]
            attach(model, ranks)
            loss = loss_of_pieces(model, batch, ranks)
            loss.backward()
            detach(model)
            found[f"{name} {kind}"] = relative(
                [loss.item(), gradient_norm(model, world_size)], expected
            )
    assert len(found) == 2 * len(MODELS)
    assert max(found.values()) < 1e-6, found


@on_ranks(2)
def test_blocks_can_be_compiled(rank, world_size):
    losses = []
    for compiles in (False, True):
        compiler = {"enabled": compiles, "backend": "aot_eager"}
        config = ds_config(sequence_parallel_size=2, compile=compiler)
        engine, _ = start(llama(num_hidden_layers=1), config)
        ids = torch.randint(97, (2, 8), generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            batch = {"input_ids": ids, "labels": ids, "position_ids": PACKED}
            loss = loss_of_pieces(engine, batch, current_group())
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        engine.destroy()
    plain, with_compiler = losses
    assert relative([with_compiler], [plain]) < 1e-6


@on_ranks(2)
def test_other_models_are_left_alone(rank, world_size):
    """A copy, another model, and the model itself in evaluation attend as ever."""
    model, other, ranks = llama(), llama(), make_group(2)
    ids = torch.randint(97, (2, 8), generator=torch.Generator().manual_seed(1 + rank))
    expected = model(input_ids=ids).logits
    attach(model, ranks, in_eval=False)
    others = other, copy.deepcopy(model), model.eval()
    assert all(torch.equal(each(input_ids=ids).logits, expected) for each in others)


IDS = torch.ones(2, 8, dtype=torch.int64)
# What an error says, and the call that raises it.
MISTAKES: dict[str, Callable[[], object]] = {
    "sequence_parallel_size: 3 does not divide the number of ranks, 2": lambda: initialize(
        sequence_parallel_size=3
    ),
    "train_batch_size: 2 is not": lambda: initialize(
        train_batch_size=2, train_micro_batch_size_per_gpu=2, accumulation=2
    ),
    "size: 2 does not divide the model's attention heads, 3": lambda: initialize(
        llama(num_attention_heads=3, num_key_value_heads=1, hidden_size=12)
    ),
    "Linear is not a model of transformers": lambda: initialize(torch.nn.Linear(2, 2)),
    "T5ForConditionalGeneration, which has an encoder and a decoder": lambda: initialize(
        T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    ),
    "layers of type ['linear_attention']": lambda: initialize(
        llama(layer_types=["full_attention", "linear_attention"])
    ),
    "mpu has no get_sequence_parallel_world_size": lambda: initialize(mpu=object()),
    "'scores' of shape (2, 4) cannot be split along the sequence: 'input_ids' is (2, 8)": (
        lambda: list(MicroBatches([{"input_ids": IDS, "scores": IDS[:, :4]}], make_group(2)))
    ),
    "a batch needs 'input_ids'": lambda: list(MicroBatches([{"embeds": IDS}], make_group(2))),
    "attention_mask of shape (2, 16) does not belong to a piece of shape (2, 8)": (
        lambda: attached()(input_ids=IDS, attention_mask=torch.ones(2, 16))
    ),
    "LlamaForCausalLM has called none of transformers' attention functions": (
        lambda: attached(num_hidden_layers=0)(input_ids=IDS)
    ),
    "a cache of earlier tokens is not supported": lambda: attached().generate(
        IDS, max_new_tokens=2, use_cache=True
    ),
}


def initialize(model: Any = None, mpu: object = None, **keys: Any) -> None:
    config = ds_config(**{"sequence_parallel_size": 2} | keys)
    zero.initialize(model=model or llama(), config=config, mpu=mpu)


def attached(**sizes: int) -> Any:
    model = llama(**sizes)
    attach(model, make_group(2))
    return model


@on_ranks(2)
def test_mistakes_are_named(rank, world_size):
    for says, mistake in MISTAKES.items():
        with pytest.raises(UsageError, match=re.escape(says)):
            mistake()


@on_ranks(2)
def test_an_error_of_a_loader_is_raised_on_all_ranks_of_its_sequence(rank, world_size):
    def batches() -> Iterator[dict[str, torch.Tensor]]:
        if rank == 1:
            raise OSError("no such shard")
        yield {"input_ids": torch.ones(1, 4, dtype=torch.long)}

    says = "^no such shard" if rank else "could not load its batch: OSError: no such shard$"
    with pytest.raises((OSError, RuntimeError), match=says):
        list(MicroBatches(batches(), make_group(2)))


@on_ranks(2)
def test_replicas_that_nothing_would_make_are_named(rank, world_size):
    """By rank 0 alone: accelerate has asked for them beside `sp_size`."""
    warnings = messages()
    parallel = ParallelismConfig(sp_backend="deepspeed", sp_size=2, dp_replicate_size=2)
    # accelerate asks for them, also where a group exists
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    plugin = TorchDynamoPlugin(backend="no")
    AcceleratorState(
        cpu=True, parallelism_config=parallel, dynamo_plugin=plugin, _from_accelerator=True
    )
    zero.initialize(model=llama(), config=ds_config() | {"sequence_parallel_size": 2})
    named = [each for each in warnings if "dp_replicate_size 2" in each and "mics_shard" in each]
    assert bool(named) == (rank == 0)


# -- tiles of the tokens, with the numbers of whole layers and no tensor larger than a tile's


ULYSSES = FacadeModule("deepspeed.runtime.sequence_parallel.ulysses_sp")
TOKENS, VOCABULARY, TILES = 30, 97, 4


def train(rank: int, world_size: int, tiles: int, stage: int) -> tuple[list[float], list[float]]:
    model = llama(intermediate_size=50)
    if tiles:
        assert tile_mlps(model, tiles) == 2
    engine, _ = start(model, ds_config(stage=stage, stage3_param_persistence_threshold=20))
    losses, norms = [], []
    for step in range(4):
        # Ranks have sequences of different lengths.
        ids = torch.randint(
            VOCABULARY, (2, 9 + rank + step), generator=torch.Generator().manual_seed(step)
        )
        labels = ids.roll(-1, dims=1).masked_fill(ids < 30, -100)
        if tiles:
            asked = {"logits_to_keep": 1, "output_hidden_states": True}
            hidden = engine(input_ids=ids, **asked).hidden_states[-1]
            loss = tiled_loss(hidden, engine.lm_head, labels, tiles)
        else:
            loss = engine(input_ids=ids, labels=labels, shift_labels=labels).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


@pytest.mark.parametrize("stage", [1, 3])
def test_tiles_train_as_whole_layers_do(stage):
    for whole, in_tiles in zip(run_on(2, train, 0, stage), run_on(2, train, 3, stage), strict=True):
        assert relative(in_tiles[0], whole[0]) < 1e-6
        assert relative(in_tiles[1], whole[1]) < 1e-6


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *found])
        return result


def parts() -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    hidden = torch.randn(2, TOKENS // 2, 4, requires_grad=True)
    return nn.Linear(4, VOCABULARY), hidden, torch.randint(VOCABULARY, (2, TOKENS // 2))


def gradients(loss: torch.Tensor, head: nn.Linear, hidden: torch.Tensor) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, head.weight, head.bias])]


def test_a_tiled_loss_makes_no_logits_of_all_tokens():
    head, hidden, labels = parts()
    with Largest() as seen:
        found = gradients(tiled_loss(hidden, head, labels, TILES), head, hidden)
    assert seen.elements == -(-TOKENS // TILES) * VOCABULARY
    expected = gradients(cross_entropy(head(hidden).flatten(0, 1), labels.flatten()), head, hidden)
    torch.testing.assert_close(found, expected)


def test_more_tiles_than_tokens_and_no_label():
    head, hidden, labels = parts()
    expected = gradients(tiled_loss(hidden, head, labels, 1), head, hidden)
    torch.testing.assert_close(
        gradients(tiled_loss(hidden, head, labels, TOKENS + 5), head, hidden), expected
    )
    none = gradients(tiled_loss(hidden, head, torch.full_like(labels, -100), TILES), head, hidden)
    assert all(not each.any() for each in none)


def test_deepspeeds_tiled_mlp():
    head, hidden, _ = parts()
    tiled_mlp = ULYSSES.TiledMLP.apply(lambda self, x: self(x), head, hidden, TILES, [head.weight])
    found = gradients(tiled_mlp.square().sum(), head, hidden)
    torch.testing.assert_close(found, gradients(head(hidden).square().sum(), head, hidden))


def test_mistakes_of_tiles_are_named():
    head, hidden, _ = parts()
    with pytest.raises(UsageError, match="Linear has no module that is named 'mlp'"):
        tile_mlps(head, 2)
    with pytest.raises(UsageError, match="tiles: must be at least 1, got 0"):
        tiled(head, hidden, tiles=0)
