"""Logits that exist in chunks of tokens give the losses and gradients of whole ones."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
)
from transformers.trainer_pt_utils import LabelSmoother

from tests.dist.training import Curve, curve_on, ds_config, relative, start, train_plain, train_zero
from tests.parity.models import VOCABULARY, batches, build
from tests.processes import run_on
from tests.tolerance import assert_close, rounding

from zero.slicing import head
from zero.slicing.head import Logits, sliced_head

STEPS, TERMS = 3, 500
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "loss_type": "ForCausalLM",
}


def gemma2() -> nn.Module:
    """Build a model with tied weights that caps its logits."""
    config = Gemma2Config(**SIZES, **DECODER, head_dim=8, final_logit_softcapping=0.5)
    return Gemma2ForCausalLM(config)


def cohere() -> nn.Module:
    """Build a model with tied weights that scales its logits."""
    return CohereForCausalLM(CohereConfig(**SIZES, **DECODER, logit_scale=0.3))


def bart() -> nn.Module:
    """Build a model that adds a bias to its logits."""
    layers = {"encoder_layers": 1, "decoder_layers": 1, "dropout": 0.0, "decoder_start_token_id": 2}
    model = BartForConditionalGeneration(
        BartConfig(**SIZES, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48,
                   encoder_attention_heads=4, decoder_attention_heads=4, **layers)
    )  # fmt: skip
    model.final_logits_bias.normal_()
    return model


def adapted() -> nn.Module:
    """Build a Llama with a trained adapter on its frozen head."""
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return get_peft_model(build("llama"), config)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gemma2": gemma2,
    "cohere": cohere,
    "bart": bart,
    "adapted": adapted,
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(7)
    return BUILDERS[name]().train() if name in BUILDERS else build(name)


def data(name: str) -> list[dict[str, torch.Tensor]]:
    return batches("t5" if name == "bart" else name, STEPS)


def plain(rank: int, world_size: int, name: str) -> Curve:
    return train_plain(model_of(name), data(name))


def in_chunks(rank: int, world_size: int, name: str, stages: list[int]) -> list[Curve]:
    """Train with chunks of three tokens."""
    curves = []
    for stage in stages:
        config = ds_config(
            activation_checkpointing={"batch_slices": 2},
            stage=stage,
            stage3_param_persistence_threshold=40,
        )
        with mock.patch.dict(head.CHUNK_ELEMENTS, cpu=3 * VOCABULARY):
            engine, _ = start(model_of(name), config)
            kinds = set()
            with mock.patch.object(head._Rows, "reduced", _noting(kinds)):
                curves.append(train_zero(engine, data(name)))
        assert kinds == {"reduced"}
        engine.destroy()
    return curves


def _noting(kinds: set[str]) -> Callable:
    reduced = head._Rows.reduced

    def noted(*args: Any) -> Any:
        kinds.add("reduced")
        return reduced(*args)

    return noted


@pytest.mark.parametrize("name", ["llama", "t5", "mixtral", *BUILDERS])
def test_the_losses_of_whole_logits(name):
    (expected,) = run_on(1, plain, name)
    for ranks, stages in ((1, [0, 3]), (2, [1, 2, 3])):
        of_ranks = run_on(ranks, in_chunks, name, stages)
        for of_stage in zip(*of_ranks, strict=True):
            losses = [
                [sum(step) / ranks for step in zip(*micro, strict=True)]
                for micro in zip(*(curve.losses for curve in of_stage), strict=True)
            ]
            found = Curve([[sum(step) / len(step)] for step in losses], of_stage[0].norms)
            assert relative(found.mean_losses(), expected.mean_losses()) <= rounding(torch.float32, TERMS)
            assert relative(found.norms, expected.norms) <= rounding(torch.float32, TERMS)
