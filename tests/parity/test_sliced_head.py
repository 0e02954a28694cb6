"""Logits that exist in chunks of tokens give the losses and gradients of whole ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.dist.training import Curve, ds_config, relative, start, train_plain, train_zero
from tests.parity.models import ROWS, VOCABULARY, batches, build, small
from tests.parity.test_adapters import IN_PEFT, quantized
from tests.parity.test_batch_slices import data
from tests.processes import run_on
from tests.tolerance import assert_close, rounding
from zero.errors import UsageError
from zero.offload import tiers
from zero.slicing import head
from zero.slicing.head import Logits, sliced_head

STEPS, TERMS = 2, 500
SIZES = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gemma2() -> nn.Module:
    """Build a model with tied weights that caps its logits."""
    return small("gemma2", **SIZES, final_logit_softcapping=0.5)


def cohere() -> nn.Module:
    """Build a model with tied weights that scales its logits."""
    return small("cohere", **SIZES, logit_scale=0.3)


def adapted(base: nn.Module | None = None, *more: str, **options: Any) -> nn.Module:
    """Build a Llama, or take `base`, with a trained adapter on its frozen head."""
    targets = ["q_proj", "lm_head", *more]
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    return get_peft_model(base or build("llama"), config)


def saved() -> nn.Module:
    """Build a model whose adapter has a head of its own, and the former one is not used."""
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    return get_peft_model(gemma2(), config)


def packed() -> nn.Module:
    """Build a model with an adapter on a head in NF4."""
    base = small("llama", **SIZES)
    quantized(base, ["lm_head"])
    return adapted(base)


ADAPTED: dict[str, Callable[[], nn.Module]] = {
    "adapted": adapted,
    "adapted and tied": lambda: adapted(gemma2(), "embed_tokens"),
    "adapted by DoRA": lambda: adapted(use_dora=True),
    "saved": saved,
    "packed": packed,
}
BUILDERS: dict[str, Callable[[], nn.Module]] = {"gemma2": gemma2, "cohere": cohere, **ADAPTED}


def model_of(name: str) -> Any:
    torch.manual_seed(7)
    return BUILDERS[name]().train() if name in BUILDERS else build(name)


def plain(rank: int, world_size: int, name: str) -> Curve:
    return train_plain(model_of(name), data(name)[:STEPS])


CHUNK = mock.patch.dict(head.CHUNK_ELEMENTS, cpu=3 * VOCABULARY)


def in_chunks(rank: int, world_size: int, name: str, stages: list[int], folder: str) -> list[Curve]:
    """Train with chunks of three tokens; adapters at stage 3 with micro-batches, checkpoints of the
    model's own too, and the base in files."""
    tiers.LEAST_BYTES_IN_A_FILE = 1
    curves = []
    for stage in stages:
        away = {"offload_param": {"device": "nvme", "nvme_path": folder}}
        away["offload_optimizer"] = {"device": "cpu"}
        accumulates = name in ADAPTED and stage == 3
        config = ds_config(
            activation_checkpointing={"batch_slices": 3},
            stage=stage,
            accumulation=3 if accumulates else 1,
            stage3_param_persistence_threshold=40,
            **(away if accumulates else {}),
        )
        with CHUNK, mock.patch.object(head, "_tell") as told:
            model = model_of(name)
            if accumulates:
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable({"use_reentrant": False})
            engine, _ = start(model, config)
            with mock.patch.object(head, "_cross_entropy", wraps=head._cross_entropy) as computed:
                curves.append(train_zero(engine, data(name)[:STEPS]))
        assert computed.call_count == STEPS * (3 if accumulates else 1)
        told.assert_not_called()
        engine.destroy()
    return curves


@pytest.mark.parametrize("name", ["llama", "t5", "mixtral", *BUILDERS])
def test_the_losses_of_whole_logits(name, tmp_path):
    (expected,) = run_on(1, plain, name)
    on_four = ((4, [1, 3]),) if name in ("llama", "t5") else ()
    for ranks, stages in ((1, [0]), (2, [2, 3]), *on_four):
        for of_stage in zip(*run_on(ranks, in_chunks, name, stages, str(tmp_path)), strict=True):
            losses = [
                sum(curve.mean_losses()[i] for curve in of_stage) / ranks for i in range(STEPS)
            ]
            assert relative(losses, expected.mean_losses()) <= rounding(torch.float32, TERMS)
            assert relative(of_stage[0].norms, expected.norms) <= rounding(torch.float32, TERMS)


@contextmanager
def in_chunks_of_three(model: Any) -> Iterator[Any]:
    """Give the model a sliced head, without an engine."""
    sliced = sliced_head(model, int)
    assert sliced is not None
    sliced.refine(1)
    with CHUNK:
        yield model
    sliced.remove()


@pytest.fixture
def model():
    with in_chunks_of_three(model_of("llama")) as made:
        yield made


def test_logits_are_ordinary_ones_without_gradients_and_in_copies(model):
    (batch,) = batches("llama", 1)
    with torch.no_grad():
        whole = model(**batch).logits
    assert type(whole) is torch.Tensor
    logits = model(**batch).logits
    assert type(logits) is Logits and logits.shape == whole.shape
    assert type(deepcopy(model)(**batch).logits) is torch.Tensor
    assert_close(logits.whole(), whole, terms=TERMS)
    assert "computed in chunks" in repr(logits)


def test_what_needs_logits_as_a_whole_is_named(model, caplog):
    logits = model(**batches("llama", 1)[0]).logits
    head._told.clear()
    with caplog.at_level(logging.WARNING, "zero"):
        logits.sort(-1)
    assert "'sort' needs the logits as a whole (0.0 GB)" in caplog.text
    logits = model(**batches("llama", 1)[0]).logits
    for act in (
        lambda: logits.data_ptr(),
        lambda: logits.mul_(2),
        lambda: logits[:, :-1].masked_fill_(logits[:, :-1] > 0, 0),
        lambda: logits.register_hook(print),
        lambda: logits.retain_grad(),
        lambda: setattr(logits, "data", logits.data),
    ):
        with pytest.raises(UsageError, match=r"use logits = logits.whole\(\) instead"):
            act()


def of_other_lengths(
    rank: int, world_size: int, stage: int, chunk: int
) -> tuple[list[float], list[str]]:
    """Losses where some ranks have chunks and others have not, in turn; and what is said to a rank
    that reads logits alone, before and after backward and the step.
    """
    config = ds_config(
        stage=stage,
        activation_checkpointing={"batch_slices": 2},
        stage3_param_persistence_threshold=0,
    )
    engine, _ = start(model_of("llama"), config)
    losses, said = [], []
    for number, batch in enumerate(batches("llama", 4)):
        length = 9 if rank == number % 2 else 2
        part = {name: value[2 * rank : 2 * rank + 2, :length] for name, value in batch.items()}
        with mock.patch.dict(head.CHUNK_ELEMENTS, cpu=chunk * VOCABULARY):
            output = engine(**part)
            for row in output.logits[rank:] if number == 2 else ():
                torch.logsumexp(row, -1)  # one rank has one row, the other two
            if rank == 0:
                output.logits.detach().argmax(-1)
            engine.backward(output.loss)
            engine.step()
        losses.append(output.loss.item())
        if type(output.logits) is Logits and rank == number % 2:
            with pytest.raises(UsageError) as raised:
                output.logits.argmax(-1)
            said.append(str(raised.value))
    return losses, said


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_need_not_have_as_many_chunks(stage):
    whole = run_on(2, of_other_lengths, stage, ROWS * 9)
    for (losses, said), (expected, nothing) in zip(
        run_on(2, of_other_lengths, stage, 5), whole, strict=True
    ):
        assert relative(losses, expected) <= rounding(torch.float32, TERMS)
        assert (len(said), nothing) == (2, [])
        assert all("call logits.whole(), before backward" in each for each in said)


def test_one_loss_of_two_backwards_and_of_other_scales(model):
    batch = batches("llama", 1)[0]
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    once = model.lm_head.weight.grad.clone()
    (3 * loss**2).backward()
    assert_close(model.lm_head.weight.grad, once * (1 + 6 * loss.item()), terms=TERMS)
    model.zero_grad()
    handle = model.lm_head.weight.register_hook(lambda grad: 2 * grad)  # called once
    model(**batch).loss.backward()
    handle.remove()
    assert_close(model.lm_head.weight.grad, 2 * once, terms=TERMS)
    with pytest.raises(UsageError, match="has no second derivative"):
        loss = torch.nn.functional.cross_entropy(
            model(**batch).logits.flatten(0, 1), batch["labels"].flatten()
        )
        torch.autograd.grad(loss, [*model.parameters()][:1], create_graph=True)


def test_what_logits_are_multiplied_with_is_trained(model):
    (batch,) = batches("llama", 1)
    found = []
    for whole in (False, True):
        scale = torch.tensor(1.3, requires_grad=True)
        bias = torch.linspace(-1, 1, VOCABULARY).requires_grad_()
        logits = model(input_ids=batch["input_ids"]).logits
        scaled = (logits.whole() if whole else logits) * scale.exp() + bias
        loss = nn.functional.cross_entropy(scaled.flatten(0, 1), batch["labels"].flatten())
        found.append(torch.autograd.grad(loss, [scale, bias, model.lm_head.weight]))
    for chunked, expected in zip(*found, strict=True):
        assert_close(chunked, expected, terms=TERMS)


class WithValues(nn.Module):
    """A model with a value for each token, of whose head the wrapper says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_model = model_of("llama")
        self.v_head = nn.Linear(30, 1)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        out = self.pretrained_model(output_hidden_states=True, **batch)
        assert type(out.logits) is (Logits if torch.is_grad_enabled() else torch.Tensor)
        chosen = out.logits.float().log_softmax(-1).gather(-1, batch["labels"].unsqueeze(-1))
        return out.loss + (self.v_head(out.hidden_states[-1]) * chosen).mean()


def test_the_head_of_a_model_inside():
    torch.manual_seed(0)
    model, (batch,) = WithValues(), batches("llama", 1)
    with torch.no_grad():
        expected = model(**batch)
    with in_chunks_of_three(model):
        assert_close(model(**batch).detach(), expected, terms=TERMS)


def test_a_loss_in_fp16_gets_its_gradient_with_the_scale_of_the_loss(model):
    batch = batches("llama", 1)[0]
    with mock.patch.object(head._Summed, "apply", wraps=head._Summed.apply) as in_forward:
        for dtype in (torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype):
                loss = model(**batch).loss
            loss.backward()
            assert in_forward.call_count == (dtype == torch.bfloat16)


@pytest.mark.filterwarnings(IN_PEFT)
def test_adapters_that_are_switched_before_the_logits_are_used_are_named():
    batch = batches("llama", 1)[0]
    with in_chunks_of_three(model_of("adapted")) as model:
        model.enable_input_require_grads()
        with model.disable_adapter():
            logits = model(**batch).logits
            assert type(logits) is Logits
            logits.logsumexp(-1)
        with pytest.raises(UsageError, match="or adapters switched, after the head"):
            logits.logsumexp(-1)
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)  # the head alone is trained
        model.disable_input_require_grads()
        assert type(model(**batch).logits) is Logits


@pytest.mark.filterwarnings(IN_PEFT)
def test_a_head_that_may_not_be_cut_is_left_alone(caplog):
    dropping = adapted(lora_dropout=0.1)
    assert sliced_head(dropping, int) is None
    with caplog.at_level(logging.WARNING, "zero"):
        assert sliced_head(dropping, int, warns=True) is None
        assert sliced_head(model_of("adapted"), int, warns=True) is not None
    (said,) = caplog.messages
    assert "the logits are whole, because the head has dropout" in said
    assert "1,000 tokens take 0.000388 GB in fp32" in said
    seen: list[torch.Tensor] = []
    with in_chunks_of_three(model_of("llama")) as hooked:
        hooked.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
        hooked(**batches("llama", 1)[0])
    assert [type(output) for output in seen] == [torch.Tensor]
