"""A batch that each block runs in slices trains as the whole batch does. `test_sliced_head`
compares models of several kinds with plain torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.dist.training import ds_config, start
from tests.parity.models import VOCABULARY, batches, build
from tests.parity.test_mixed_precision import SECTIONS
from tests.processes import run_on
from tests.releases import needs
from tests.tolerance import assert_close, rounding
from zero.config.load import load_config
from zero.errors import UsageError
from zero.fragments import safe_get_full_grad
from zero.slicing import blocks

STEPS, WIDTH = 4, 8
TRUSTED = {"trust_slices": True}
# About the sum of the inner lengths of these models in a forward.
TERMS = 500


def data(name: str) -> list[dict[str, torch.Tensor]]:
    """Batches of T5 and Llama with masks, so that their blocks are given some. In those of Mixtral,
    each row packs two sequences, which only their positions tell apart.
    """
    made = batches(name, STEPS)
    for batch in made:
        rows, length = batch["input_ids"].shape
        if name == "mixtral":
            positions = torch.arange(length) % (length // 2 + 1)
            batch["position_ids"] = positions.expand(rows, length)
        else:
            batch["attention_mask"] = mask = torch.ones_like(batch["input_ids"])
            mask[::2, -2:] = 0
    return made


def with_router_logits(rank: int, world_size: int) -> None:
    """Their loss is that of the experts of the whole batch. There is one tensor for each block."""
    plain, model = build("mixtral"), build("mixtral")
    (batch,) = data("mixtral")[:1]
    for each in (plain, model):
        each.config.output_router_logits = each.model.config.output_router_logits = True
        each.router_aux_loss_coef = 1.0
    engine, _ = start(model, ds_config(activation_checkpointing={"batch_slices": 5}))
    expected, found = plain(**batch), engine(**batch)
    expected.loss.backward()
    engine.backward(found.loss)
    assert_close(found.aux_loss, expected.aux_loss, TERMS)
    for mine, own in zip(found.router_logits, expected.router_logits, strict=True):
        assert_close(mine, own, TERMS)
    for block, own in zip(model.model.layers, plain.model.layers, strict=True):
        mine = safe_get_full_grad(block.mlp.gate.weight)
        assert_close(mine, own.mlp.gate.weight.grad, TERMS)


@needs("transformers", "5.23", "it collects one tensor for each slice")
def test_router_logits_are_those_of_the_whole_batch():
    run_on(1, with_router_logits)


def errors_of_16_bits(rank: int, world_size: int, dtype: torch.dtype) -> tuple[float, float]:
    """Relative errors of the blocks' gradients, of the whole batch and of 64 slices."""
    exact = build("llama").to(dtype).double()
    tokens = torch.randint(0, VOCABULARY, (64, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    exact(**batch).loss.backward()

    def error(slices: int) -> float:
        model = build("llama")
        section = {"batch_slices": slices}
        engine, _ = start(model, ds_config(activation_checkpointing=section, **SECTIONS[dtype]))
        engine.backward(engine(**batch).loss)
        found = [safe_get_full_grad(param) for param in model.model.layers.parameters()]
        expected = [param.grad for param in exact.model.layers.parameters()]
        apart = [a.double() - b for a, b in zip(found, expected, strict=True)]
        norm = torch.nn.utils.get_total_norm
        return (norm(apart) / norm(expected)).item()

    return error(1), error(64)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch adds in 16 bits")
@pytest.mark.parametrize("dtype", SECTIONS)
def test_gradients_of_slices_are_not_added_in_16_bits(dtype):
    """In 16 bits, 64 slices would have 1.65 times the error of the whole batch."""
    ((whole, in_slices),) = run_on(1, errors_of_16_bits, dtype)
    assert in_slices < 1.1 * whole < 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[torch.Tensor, None]:
        return hidden + self.dropout(self.down(self.up(hidden).relu())) * scale["scale"], None


run = Block.forward


class Odd(Block):
    """Its forward is `act`, a function of a script."""

    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.act = act
        self.gate = nn.Parameter(torch.zeros(()))
        self.losses: list[torch.Tensor] = []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> Any:
        return self.act(self, hidden, scale)


def gated(block: Any, hidden: torch.Tensor, scale: dict) -> Any:
    """It normalizes over the batch in a branch that starts at zero."""
    return hidden + block.gate * block.up(hidden - hidden.mean(0)).sum(1, keepdim=True), None


def with_loss(block: Any, hidden: torch.Tensor, scale: dict) -> Any:
    """Its dropout is no module, and its loss is zero outside of training."""
    hidden = nn.functional.dropout(hidden, 0.5, block.training)
    hidden, _ = run(block, hidden, scale)
    return hidden, hidden.square().mean() * block.training


def keeping(block: Any, hidden: torch.Tensor, scale: dict) -> Any:
    block.loss = hidden.square().mean()
    return run(block, hidden, scale)


def listing(block: Any, hidden: torch.Tensor, scale: dict) -> Any:
    block.losses.append(hidden.square().mean())
    return run(block, hidden, scale)


def writing(block: Any, hidden: torch.Tensor, scale: dict) -> Any:
    scale["loss"] = hidden.square().mean()
    return run(block, hidden, scale)


def counting(block: Any, hidden: torch.Tensor, scale: dict) -> Any:
    block.seen += block.training
    return run(block, hidden, scale)


def in_place(block: Any, hidden: torch.Tensor, scale: dict) -> Any:
    hidden += 1
    return run(block, hidden, scale)


class Thing:
    """No tensor, and nothing that holds some."""


class Model(nn.Module):
    """Its blocks run in slices without an engine, if `slices` says so."""

    def __init__(self, block: Callable[[], nn.Module], slices: int = 1, scale: Any = 2.0):
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.slices, self.scale = slices, scale

    def forward(self, x: torch.Tensor, reentrant: bool = False) -> torch.Tensor:
        def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            parts = x.tensor_split(self.slices)
            return torch.cat([block(part, {"scale": self.scale})[0] for part in parts])

        for block in self.blocks:
            x = checkpoint(run, block, x, use_reentrant=True) if reentrant else run(block, x)
        return x.square().mean()


def grads_with_dropout(rank: int, world_size: int, stage: int, reentrant: bool) -> bool:
    """Whether the engine's gradients, masks of dropout included, are those of plain torch."""
    torch.manual_seed(3)
    plain, model = Model(Block, slices=3), Model(Block)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(7, WIDTH, requires_grad=True)
    config = ds_config(activation_checkpointing={"batch_slices": 3} | TRUSTED, stage=stage)
    engine, _ = start(model, config)
    torch.manual_seed(5)
    plain(x).backward()
    torch.manual_seed(5)
    engine.backward(engine(x, reentrant))
    return all(
        torch.allclose(safe_get_full_grad(mine), own.grad, rtol=1e-5, atol=1e-7)
        for mine, own in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize(("stage", "reentrant"), [(0, False), (2, True), (3, False), (3, True)])
def test_a_slice_is_recomputed_with_its_own_random_numbers(stage, reentrant):
    assert run_on(2, grads_with_dropout, stage, reentrant) == [True, True]


REFUSED = [
    (lambda block, x, scale: run(block, x - x.mean(0), scale), "gives other values"),
    (
        lambda block, x, scale: run(block, x - x.mean(0) * block.training, scale),
        "gives other values",
    ),
    (gated, "gives other values"),
    (with_loss, "returns a tensor without a batch dimension"),
    (
        lambda block, x, scale: with_loss(block, x, scale)[: 1 + block.training],
        "draws random numbers and returns other outputs",
    ),
    (keeping, "keeps 'loss', of which each slice has another value"),
    (listing, "keeps 'losses', of which each slice has another value"),
    (writing, "changes a list or dict that it is given"),
    (counting, "writes to its buffer 'seen'"),
    (in_place, "changes its input in place"),
    (
        lambda block, x, scale: run(block, x.view(4, WIDTH), scale),
        "fails with two rows of its batch (shape '[4, 8]' is invalid",
    ),
]


def refuses(model: nn.Module, text: str) -> None:
    section = {"batch_slices": 2} | TRUSTED
    with pytest.raises(UsageError, match=re.escape(text)):
        engine, _ = start(model, ds_config(activation_checkpointing=section))
        for _ in range(2):
            engine.backward(engine(torch.randn(4, WIDTH)).sum())
            engine.step()


def refused(rank: int, world_size: int) -> None:
    for act, text in REFUSED:
        refuses(Model(partial(Odd, act)), f"block 'blocks.0' {text}")
    normed = Model(Block)
    normed.blocks[0].norm = nn.BatchNorm1d(WIDTH)
    refuses(normed, "block 'blocks.0' has a BatchNorm1d")
    refuses(Model(Block, scale=Thing()), "block 'blocks.0' is given a Thing")
    for scale in (torch.arange(4), [1.0] * 4):
        refuses(Model(Block, scale=scale), "which may belong to its 4 examples")
    refuses(nn.Linear(WIDTH, 1), "has no blocks")


def test_blocks_that_cannot_run_in_slices_are_named():
    run_on(1, refused)


class Clipped(nn.Linear):
    """Its backward is its own."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = super().forward(hidden)
        out.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return out


def with_own_attention(model: Any) -> None:
    def attention(module: Any, query: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, None]:
        return query.transpose(1, 2) - query.mean(), None

    ALL_ATTENTION_FUNCTIONS.register("own", attention)
    model.set_attn_implementation("own")


def with_own_layer(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.__class__ = Clipped


def with_own_forward(model: Any) -> None:
    model.model.layers[0].mlp.forward = lambda hidden: hidden - hidden.mean()


def as_liger_does(model: Any) -> None:
    """A norm of another class, and an MLP with another forward, of a package that is known."""

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))

    class LigerRMSNorm(type(model.model.norm)): ...

    forward.__module__ = LigerRMSNorm.__module__ = "liger_kernel.transformers.stand_in"
    for layer in model.model.layers:
        layer.input_layernorm.__class__ = LigerRMSNorm
        layer.mlp.forward = forward.__get__(layer.mlp)


UNKNOWN = {
    with_own_attention: "is a LlamaAttention with 'attention' of the script",
    with_own_layer: "contains 'mlp.up_proj', which is a Clipped",
    with_own_forward: "contains 'mlp', which is a LlamaMLP with 'forward' of the script",
}


def unknown(rank: int, world_size: int) -> None:
    """What is said of blocks that no one trusts: of a script's class, and of Llama's with something
    of the script inside.
    """
    section = {"activation_checkpointing": {"batch_slices": 2}}

    def says(model: Any, text: str) -> None:
        trust = "set activation_checkpointing.trust_slices to true"
        with pytest.raises(UsageError, match=f"(?s){text}.*{trust}"):
            start(model, ds_config(**section))

    for change, text in UNKNOWN.items():
        model = build("llama")
        change(model)
        says(model, text)
    says(Model(Block), "block 'blocks.0' is a Block, which is none of transformers' blocks")
    model = build("llama")
    model.model.layers[1].mlp.up_proj.__class__ = Clipped
    says(model, r"layers\.1")
    # The layer before it is as it was.
    assert not any("forward" in vars(module) for module in model.modules())
    model = build("llama")
    as_liger_does(model)
    engine, _ = start(model, ds_config(**section))
    (batch,) = data("llama")[:1]
    kept: list[Any] = []
    outer = model.model.layers[0].register_forward_hook(lambda *args: kept.append(args[2]))
    engine.backward(engine(**batch).loss)
    assert [len(each) for each in kept] == [len(batch["input_ids"])]  # a hook on a block is right
    outer.remove()
    for register, text in (
        (model.model.layers[1].mlp.register_forward_hook, "is on 'mlp'"),
        (model.model.layers[1].mlp.register_full_backward_hook, "is on 'mlp'"),
        (nn.modules.module.register_module_forward_hook, "is registered for all modules"),
    ):
        handle = register(lambda *args: None)
        with pytest.raises(UsageError, match=f"a hook of the script {text}"):
            engine(**batch)
        handle.remove()


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_that_are_neither_known_nor_trusted_are_named(world_size):
    run_on(world_size, unknown)


def test_accelerate_leaves_the_word_to_zero():
    """It fills in each "auto", and has no argument for this key."""
    section = {"activation_checkpointing": {"batch_slices": "Auto"}}
    plugin: Any = SimpleNamespace(hf_ds_config=HfDeepSpeedConfig(section))
    DeepSpeedPlugin.fill_match(plugin, "activation_checkpointing.batch_slices")
    found = load_config(plugin.hf_ds_config.config)
    assert found.activation_checkpointing.batch_slices == "auto"


def copies(rank: int, world_size: int) -> None:
    """A copy of the model, and the model after its engine, run whole batches."""
    model = Model(Block)
    model.blocks[0].gradient_checkpointing = True  # as transformers' blocks have it
    section = {"batch_slices": 2} | TRUSTED
    config = ds_config(activation_checkpointing=section, bf16={"enabled": True}, stage=1)
    engine, _ = start(model, config)
    with mock.patch.object(blocks.logger, "warning") as told:
        engine(torch.randn(4, WIDTH, dtype=torch.bfloat16))
        assert not told.called
        engine(torch.randn(1, WIDTH, dtype=torch.bfloat16))
    assert "batch of one example" in told.call_args.args[0]
    assert not model.blocks[0].gradient_checkpointing
    copy = deepcopy(model)
    engine.destroy()
    assert model.blocks[0].gradient_checkpointing
    model.blocks[0].up.weight.grad = torch.zeros_like(model.blocks[0].up.weight)
    for each in (model, copy):
        calls = []
        each.blocks[0].up.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        each(torch.randn(4, WIDTH, dtype=torch.bfloat16))
        assert len(calls) == 1


def test_a_copy_of_the_model_is_an_ordinary_one():
    run_on(1, copies)


def turned_on_again(rank: int, world_size: int) -> list[float]:
    """Between forward and backward, the script turns the blocks' own checkpoints on, as TRL's DPO
    does after it has run its model as a reference.
    """
    norms = []
    for slices in (1, 2):
        config = ds_config(activation_checkpointing={"batch_slices": slices})
        engine, _ = start(build("llama"), config)
        loss = engine(**data("llama")[0])["loss"]
        engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    return norms


def test_checkpoints_that_are_turned_on_before_backward():
    ((whole, sliced),) = run_on(1, turned_on_again)
    assert abs(sliced - whole) <= rounding(torch.float32, TERMS) * whole
