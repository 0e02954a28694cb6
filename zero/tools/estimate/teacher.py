"""A frozen teacher beside the model of an estimate, from which that model learns as in
`run_distill.py`.

The teacher runs first. The loss is computed in the student's head, a chunk of tokens at a time, so
no logits of a whole batch exist. The tensors of a chunk are those of `distill/fused.py`, with
forward KL and cross-entropy. `tests/accelerator/test_estimate.py` compares the two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.functional import linear

from zero.config import Config, load_config
from zero.config.sharding import frozen_beside
from zero.engine import ZeroEngine
from zero.errors import UsageError
from zero.tools.estimate.adapters import elements, quantize_fused_experts
from zero.tools.estimate.calls import META
from zero.tools.estimate.machine import Memory
from zero.tools.estimate.model import (
    build,
    forward,
    read_config,
    require_tokens,
    without_values,
)
from zero.tools.estimate.parts import PARAMETERS
from zero.tools.estimate.question import Question

# The end of the names of its parts.
OF_TEACHER = " of the teacher"
# Logits of a chunk, on an accelerator.
CHUNK_ELEMENTS = 2**26


class Teacher(NamedTuple):
    """The teacher's folder, its model on the meta device, and the configuration that
    `run_distill.py` gives it by default.
    """

    source: str
    model: nn.Module
    config: Config

    @classmethod
    def read(cls, source: str, bits: int | None, student: Config) -> Teacher:
        """Build the teacher of a student with this configuration. `bits`: those of its quantized
        weights, if its `config.json` has no quantization_config. Raises UsageError as `build` does.
        """
        shape = read_config(source)
        if bits is not None:
            quantization = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}
            shape.quantization_config = quantization
        given, auto = student.zero_optimization.model_dump(exclude_unset=True), student.origin.auto
        own = {key: each for key, each in given.items() if f"zero_optimization.{key}" not in auto}
        hidden_size = shape.get_text_config().hidden_size
        sections = {
            name: getattr(student, name).model_dump(exclude_unset=True)
            for name in ("bf16", "fp16", "aio")
        }
        batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        zero = {"zero_optimization": frozen_beside(own, hidden_size, pin_memory=True)}
        model = build(shape, student.compute_dtype, is_frozen=True)
        return cls(source, model, load_config(sections | batch | zero))

    def __str__(self) -> str:
        return f"{self.source} ({elements(self.model):,} parameters, frozen)"


def engine_of(teacher: Teacher, memory: Memory) -> ZeroEngine:
    """Return the teacher's engine on the imitated machine."""
    model = without_values(teacher.model)
    with memory.counting(OF_TEACHER):
        hold_quantized(model, teacher.config, memory)
        engine = ZeroEngine(model.eval(), teacher.config)
    engine.comm.clock.shows = False
    return engine


def hold_quantized(model: nn.Module, config: Config, memory: Memory) -> None:
    """Count the codes and scales of quantized weights. Every rank holds all of them, unless the
    engine takes them over.
    """
    before, memory.part = memory.part, PARAMETERS
    if config.zero_optimization.stage == 3:
        quantize_fused_experts(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_floating_point():
            memory.note(tensor)
    memory.part = before


def distillation(
    engine: ZeroEngine, teacher: ZeroEngine, question: Question, memory: Memory
) -> Callable[[], torch.Tensor]:
    """Return a function that runs the forward of both models and returns the loss."""
    heads = [_plain_head(each.module, question) for each in (engine, teacher)]
    ids = torch.zeros(question.batch, question.length, dtype=torch.long, device=META)
    pairs = cast(Any, engine.module).config.is_encoder_decoder
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if pairs else {})

    def loss() -> torch.Tensor:
        head, their_head = heads
        their_head.forward = lambda hidden: hidden
        with torch.no_grad(), memory.counting(OF_TEACHER):
            states = forward(teacher, **inputs).logits.flatten(0, 1).clone()
        head.forward = partial(_compared, head, their_head, states, memory)
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


def _compared(
    head: nn.Linear, their_head: Any, states: torch.Tensor, memory: Memory, hidden: torch.Tensor
) -> torch.Tensor:
    """Return the loss, computed in the calls of both heads, because there the weights are
    gathered.
    """
    found: list[torch.Tensor] = []

    def compare(states: torch.Tensor) -> None:
        with memory.counting(""):
            rows = hidden.flatten(0, 1).clone()
            found.append(_FusedLoss.apply(rows, head.weight, states, their_head.weight))

    their_head.forward = compare
    with memory.counting(OF_TEACHER):
        their_head(states)
    return found.pop()


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
