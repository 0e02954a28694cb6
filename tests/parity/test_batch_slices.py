"""A batch that each block runs in slices trains as the whole batch does. `test_sliced_head`
compares models of several kinds with plain torch.
"""

from __future__ import annotations

import re
from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.dist.training import Curve, ds_config, relative, start, train_zero
from tests.parity.models import VOCABULARY, batches, build
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


def with_adapter(rank: int, world_size: int, folder: str) -> list[Curve]:
    """A frozen base in files and trained LoRA adapters, checkpointed by the model too: whole
    batches, and slices, of which an update takes two micro-batches.
    """
    away = {"device": "nvme", "nvme_path": folder}
    curves = []
    for slices in (None, 3):
        model = get_peft_model(build("llama"), LoraConfig(r=4, target_modules="all-linear"))
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        config = ds_config(
            activation_checkpointing={"batch_slices": slices} if slices else {},
            accumulation=2,
            clip=1.0,
            stage3_param_persistence_threshold=40,
            offload_param=away,
        )
        curves.append(train_zero(start(model, config)[0], data("llama")))
    return curves


def test_a_frozen_base_in_files_with_adapters(tmp_path):
    for whole, in_slices in run_on(2, with_adapter, str(tmp_path)):
        assert relative(in_slices.mean_losses(), whole.mean_losses()) <= rounding(
            torch.float32, TERMS
        )


def in_fp16(rank: int, world_size: int) -> list[list[float]]:
    found = []
    for slices in (1, 3):
        config = ds_config(
            activation_checkpointing={"batch_slices": slices},
            clip=0.2,
            fp16={"enabled": True, "initial_scale_power": 8},
        )
        engine, _ = start(build("t5"), config)
        found.append(train_zero(engine, data("t5")).mean_losses())
        engine.destroy()
    return found


def test_the_losses_of_one_batch_in_fp16():
    for whole, in_slices in run_on(2, in_fp16):
        assert relative(in_slices, whole) <= rounding(torch.float16, 1, STEPS)


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


def errors_of_16_bits(rank: int, world_size: int) -> tuple[float, float]:
    """Relative errors of the blocks' bf16 gradients, of the whole batch and of 64 slices."""
    exact = build("llama").to(torch.bfloat16).double()
    tokens = torch.randint(0, VOCABULARY, (64, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    exact(**batch).loss.backward()

    def error(slices: int) -> float:
        model = build("llama")
        config = ds_config(
            activation_checkpointing={"batch_slices": slices}, bf16={"enabled": True}
        )
        engine, _ = start(model, config)
        engine.backward(engine(**batch).loss)
        found = [safe_get_full_grad(param) for param in model.model.layers.parameters()]
        expected = [param.grad for param in exact.model.layers.parameters()]
        apart = [a.double() - b for a, b in zip(found, expected, strict=True)]
        norm = torch.nn.utils.get_total_norm
        return (norm(apart) / norm(expected)).item()

    return error(1), error(64)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch adds in 16 bits")
def test_gradients_of_slices_are_not_added_in_16_bits():
    """In 16 bits, 64 slices would have 1.65 times the error of the whole batch."""
    for whole, in_slices in run_on(1, errors_of_16_bits):
        assert in_slices < 1.1 * whole


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[torch.Tensor, None]:
        return hidden + self.dropout(self.down(self.up(hidden).relu())) * scale["scale"], None


class Plain(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Identity()


class Mixing(Block):
    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[torch.Tensor, None]:
        return super().forward(hidden - hidden.mean(0), scale)


class MixingInTraining(Block):
    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[torch.Tensor, None]:
        mean = hidden.mean(0) if self.training else hidden.new_zeros(WIDTH)
        return super().forward(hidden - mean, scale)


class WithLoss(Block):
    """Its dropout is no module, and its loss is zero outside of training."""

    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        hidden = nn.functional.dropout(hidden, 0.5, self.training)
        hidden, _ = super().forward(hidden, scale)
        return hidden, hidden.square().mean() if self.training else hidden.new_zeros(())


class WithLossInTraining(WithLoss):
    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[Any, ...]:
        return super().forward(hidden, scale)[: 1 + self.training]


class KeepingLoss(Block):
    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[torch.Tensor, None]:
        hidden, _ = super().forward(hidden, scale)
        self.loss = hidden.square().mean()
        return hidden, None


class KeepingList(Block):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[torch.Tensor, None]:
        self.losses.append(hidden.square().mean())
        return super().forward(hidden, scale)


class Writing(Block):
    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[torch.Tensor, None]:
        scale["loss"] = hidden.square().mean()
        return super().forward(hidden, scale)


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[torch.Tensor, None]:
        if self.training:
            self.seen += 1
        return super().forward(hidden, scale)


class Gated(Block):
    """It normalizes over the batch in a branch that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[torch.Tensor, None]:
        return hidden + self.gate * self.up(hidden - hidden.mean(0)).sum(1, keepdim=True), None


class InPlace(Block):
    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[torch.Tensor, None]:
        hidden += 1
        return super().forward(hidden, scale)


class Needing(Block):
    def forward(self, hidden: torch.Tensor, scale: dict[str, Any]) -> tuple[torch.Tensor, None]:
        return super().forward(hidden.view(4, WIDTH), scale)


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


class Thing:
    """No tensor, and nothing that holds some."""


class Model(nn.Module):
    """Its blocks run in slices without an engine, if `slices` says so."""

    def __init__(self, block: type[nn.Module], slices: int = 1, scale: Any = 2.0):
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


REFUSED = {
    Mixing: "block 'blocks.0' gives other values",
    MixingInTraining: "block 'blocks.0' gives other values",
    WithLoss: "block 'blocks.0' returns a tensor without a batch dimension",
    WithLossInTraining: "block 'blocks.0' draws random numbers and returns other outputs",
    KeepingLoss: "block 'blocks.0' keeps 'loss', of which each slice has another value",
    KeepingList: "block 'blocks.0' keeps 'losses', of which each slice has another value",
    Writing: "block 'blocks.0' changes a list or dict that it is given",
    Counting: "block 'blocks.0' writes to its buffer 'seen'",
    Gated: "block 'blocks.0' gives other values",
    InPlace: "block 'blocks.0' changes its input in place",
    Needing: "block 'blocks.0' fails with two rows of its batch (shape '[4, 8]' is invalid",
    Normed: "block 'blocks.0' has a BatchNorm1d",
}


def refuses(model: nn.Module, text: str) -> None:
    section = {"batch_slices": 2} | TRUSTED
    with pytest.raises(UsageError, match=re.escape(text)):
        engine, _ = start(model, ds_config(activation_checkpointing=section))
        for _ in range(2):
            engine.backward(engine(torch.randn(4, WIDTH)).sum())
            engine.step()


def refused(rank: int, world_size: int) -> None:
    for kind, text in REFUSED.items():
        refuses(Model(kind), text)
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
    says(Model(Plain), "block 'blocks.0' is a Plain, which is none of transformers' blocks")
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


def compiled(rank: int, world_size: int) -> list[list[float]]:
    found = []
    for section in ({}, {"batch_slices": 3} | TRUSTED):
        torch.manual_seed(3)
        engine, _ = start(Model(Plain), ds_config(activation_checkpointing=section))
        if section:
            engine.compile(backend="aot_eager")
        found.append(train_zero(engine, [{"x": torch.randn(6, WIDTH)}] * STEPS).mean_losses())
    return found


def test_slices_are_compiled():
    for whole, in_slices in run_on(2, compiled):
        assert relative(in_slices, whole) <= rounding(torch.float32, TERMS)


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
