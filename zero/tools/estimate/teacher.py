"""A frozen teacher beside the model of an estimate, from which that model learns as in
`run_distill.py`.

The teacher runs first. The loss is computed in the student's head, a chunk of tokens at a time, so
no logits of a whole batch exist. The tensors of a chunk are those of `distill/fused.py`, with
forward KL and cross-entropy. `tests/accelerator/test_estimate.py` compares the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import nn
from torch.nn.functional import linear

from zero.config import Config, load_config
from zero.config.sharding import frozen_beside
from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.tools.estimate.adapters import hold_quantized
from zero.tools.estimate.calls import META
from zero.tools.estimate.machine import Memory
from zero.tools.estimate.model import (
    build,
    forward,
    read_config,
    require_tokens,
    without_values,
)
from zero.tools.estimate.question import Question, Teacher

# The end of the names of its parts.
OF_TEACHER = " of the teacher"
# Logits of a chunk, on an accelerator.
CHUNK_ELEMENTS = 2**26


def read_teacher(
    source: str, bits: int | None, student: Config, shape: transformers.PretrainedConfig
) -> Teacher:
    """Build the teacher of a student with this configuration, as `run_distill.py` does by default.

    Args:
        bits: those of its quantized weights, if its `config.json` has no quantization_config.
        shape: the student's `config.json`.

    Raises UsageError as `build` does, or if it cannot be compared with the student.
    """
    try:
        own = read_config(source)
    except UsageError as error:
        raise UsageError(f"--teacher {error}") from error
    if own.is_encoder_decoder != shape.is_encoder_decoder:
        raise UsageError(
            f"--teacher {source}: one of teacher and student is an encoder-decoder and the other "
            "is not, so they cannot be compared token by token; name two of one kind"
        )
    if bits is not None:
        own.quantization_config = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}
    given = student.zero_optimization.model_dump(exclude_unset=True)
    keys = {
        key: each
        for key, each in given.items()
        if f"zero_optimization.{key}" not in student.origin.auto
    }
    hidden_size = own.get_text_config().hidden_size
    sections = {
        name: getattr(student, name).model_dump(exclude_unset=True)
        for name in ("bf16", "fp16", "aio")
    }
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    zero = {"zero_optimization": frozen_beside(keys, hidden_size, pin_memory=True)}
    model = build(own, student.compute_dtype, is_frozen=True)
    return Teacher(model, load_config(sections | batch | zero))


def distillation(
    engine: ZeroEngine, beside: Teacher, question: Question, memory: Memory
) -> Callable[[], torch.Tensor]:
    """Return a function that runs the forward of both models and returns the loss."""
    model, config = without_values(beside.model), beside.config
    with patch.object(memory, "whose", OF_TEACHER):
        hold_quantized(model, config, memory)
        teacher = ZeroEngine(model.eval(), config)
    teacher.comm.clock.shows = False
    head, their_head = (_plain_head(each.module, question) for each in (engine, teacher))
    ids = torch.zeros(question.batch, question.length, dtype=torch.long, device=META)
    inputs = {"input_ids": ids}
    if beside.model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    found: list[torch.Tensor] = []

    def loss() -> torch.Tensor:
        their_head.forward = lambda hidden: hidden
        with torch.no_grad(), patch.object(memory, "whose", OF_TEACHER):
            states = forward(teacher, **inputs).logits.flatten(0, 1).clone()

        # Within the calls of both heads, because there the weights are gathered.
        def compare(hidden: torch.Tensor) -> torch.Tensor:
            def compare_with(states: torch.Tensor) -> None:
                with patch.object(memory, "whose", ""):
                    rows = hidden.flatten(0, 1).clone()
                    found.append(_FusedLoss.apply(rows, head.weight, states, their_head.weight))

            their_head.forward = compare_with
            with patch.object(memory, "whose", OF_TEACHER):
                their_head(states)
            return found.pop()

        head.forward = compare
        return forward(engine, **inputs).logits

    return loss


def _plain_head(model: Any, question: Question) -> Any:
    require_tokens(model, question.length)
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UsageError(
            f"--teacher: the head of {type(model).__name__} is a {type(head).__name__}, expected a "
            "linear layer"
        )
    return head


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        states: torch.Tensor,
        their_weight: torch.Tensor,
    ) -> torch.Tensor:
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        size = max(1, CHUNK_ELEMENTS // len(weight))
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            logits = linear(hidden[rows], weight).float()
            log_q = logits.log_softmax(-1)
            said = linear(states[rows], their_weight)
            log_p = said.float().log_softmax(-1)
            slope = log_p.exp()
            gradient = torch.addcmul(log_q, log_q.exp(), log_q)
            del logits, log_q, said, log_p, slope
            gradient = gradient.to(weight.dtype)
            torch.mm(gradient, weight, out=d_hidden[rows])
            if weight.dtype == d_weight.dtype:
                d_weight.addmm_(gradient.T, hidden[rows])
            else:
                d_weight += gradient.T @ hidden[rows]
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = weight.dtype
        return d_weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * gradients[0], (d_weight * gradients[0]).to(ctx.dtype), None, None
