"""Batches that the student (GKD, arXiv 2306.13649) or the teacher (sequence-level distillation)
generates.

The number of the step and the seed decide whether a batch is replaced, so all ranks make the same
decision. They must, because with sharding, generation needs all ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

import zero
from distill.batch import IGNORED

if TYPE_CHECKING:
    from transformers._typing import GenerativePreTrainedModel

# What a model needs to begin and end its text. A forced end, at `max_new_tokens`, is not its own.
TOKENS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id",
)  # fmt: skip


def writer_of(step: int, micro_batch: int, seed: int, lmbda: float, seq_kd: bool) -> str | None:
    """Return who generates a batch: "student" with probability `lmbda`, else "teacher" if `seq_kd`,
    else None.
    """
    if random.Random(f"{seed} {step} {micro_batch}").random() < lmbda:
        return "student"
    return "teacher" if seq_kd else None


@contextmanager
def drawing(
    seed: int, step: int, micro_batch: int, rank: int, device: torch.device
) -> Iterator[None]:
    """Draw the text of a batch from random numbers of its own, so that a resumed run writes the
    same one. The Trainer restores its random state only after it has made the first step's batches.
    """
    # MPS has one state for all devices, which `fork_rng` cannot keep.
    devices = [] if device.type in ("cpu", "mps") else [device.index or 0]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(random.Random(f"{seed} {step} {micro_batch} {rank}").getrandbits(63))
        yield


def prompt_lengths(labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (batch,) tokens before the first label of each example. If the whole example is
    learnt: half of it. At least 1.

    The first token of an example is always a prompt, because nothing comes before it.
    """
    learnt = labels != IGNORED
    first = learnt.int().argmax(dim=1)
    lengths = mask.sum(1)
    return torch.where(first <= 1, lengths // 2, first).clamp_min(1)


def generate(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    """Return the token ids (batch, length) that `model.generate(**options)` writes.

    Of the model's own settings only special tokens count: beams, forbidden repetitions and other
    settings would change the distribution that it writes from.

    Raises:
        ValueError: the model has no `generate`.
    """
    if hasattr(model, "get_base_model"):  # PEFT's, with its adapters in the layers
        model = cast(Any, model).get_base_model()
    if not isinstance(model, GenerationMixin):
        raise ValueError(f"a {type(model).__name__} cannot generate: use another model")
    writer = cast("GenerativePreTrainedModel", model)
    own = writer.generation_config
    # Not an argument of `generate`, which would fill it up with the model's own settings.
    writer.generation_config = GenerationConfig(**{name: getattr(own, name) for name in TOKENS})
    try:
        written = writer.generate(**options)
    finally:
        writer.generation_config = own
    return written if isinstance(written, torch.Tensor) else written.sequences


def end_tokens(model: PreTrainedModel, eos_token_id: int | None) -> list[int]:
    """Return the ids that end an answer: the tokenizer's, and those of the model's
    `generation_config`, which chat models have for the end of a turn.
    """
    config = getattr(model, "generation_config", None)
    own = getattr(config, "eos_token_id", None)
    own = own if isinstance(own, list) else [own]
    return sorted({end for end in (eos_token_id, *own) if end is not None})


@torch.no_grad()
def rewrite(
    model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    max_new_tokens: int,
    pad_token_id: int,
    ends: list[int],
    by_student: bool,
    is_sharded: bool = False,
) -> dict[str, torch.Tensor]:
    """Return a batch with the prompts of `inputs` (input_ids, attention_mask, labels) and answers
    by `model`.

    Causal models continue the prompt of each example. Encoder-decoder models write a target for the
    source. The labels are the generated tokens, up to the first of `ends`.

    The student samples from its own distribution, and is gathered once for the whole batch. The
    teacher, which may not fit, is greedy and gathered block by block for each token. `is_sharded`:
    then all ranks go on until the last one is done.

    Raises:
        ValueError: the batch is packed, so its examples have no separate prompts.
    """
    if "position_ids" in inputs:
        raise ValueError(
            "lmbda and seq_kd continue each example: give examples that are not packed"
        )
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": by_student,
        "pad_token_id": pad_token_id,
        "eos_token_id": ends or None,
        "synced_gpus": not by_student and is_sharded and dist.get_world_size() > 1,
        "top_k": 0 if by_student else None,  # transformers' own default is 50
    }
    training = model.training
    model.eval()
    whole_student = zero.GatheredParameters(model, enabled=by_student)
    if model.config.is_encoder_decoder:
        with whole_student:
            written = generate(model, input_ids=ids, attention_mask=mask, **options)[:, 1:]
        batch = {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": _until_end(written, ends),
        }
    else:
        prompts, prompt_mask = _left_padded(
            ids, prompt_lengths(inputs["labels"], mask), pad_token_id
        )
        with whole_student:
            whole = generate(model, input_ids=prompts, attention_mask=prompt_mask, **options)
        answers = _until_end(whole[:, prompts.shape[1] :], ends)
        labels = torch.cat([torch.full_like(prompts, IGNORED), answers], dim=1)
        batch = _right_padded(whole, labels, prompt_mask, answers, pad_token_id)
    model.train(training)
    return batch


def _left_padded(
    ids: torch.Tensor, lengths: torch.Tensor, pad: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `lengths` tokens of each row, moved to the right end of a block, and the
    mask.
    """
    width = int(lengths.max())
    column = torch.arange(width, device=ids.device) - (width - lengths).unsqueeze(1)
    mask = column >= 0
    return ids.gather(1, column.clamp_min(0)).masked_fill(~mask, pad), mask.long()


def _until_end(written: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Return the labels of generated tokens: the tokens up to the first end token, -100 after
    it.
    """
    ended = torch.isin(written, torch.tensor(ends, device=written.device)).int()
    after = (ended.cumsum(1) - ended) > 0
    return written.masked_fill(after, IGNORED)


def _right_padded(
    whole: torch.Tensor,
    labels: torch.Tensor,
    prompt_mask: torch.Tensor,
    answers: torch.Tensor,
    pad: int,
) -> dict[str, torch.Tensor]:
    """Return the batch with the tokens of each row moved to the left end, as in training
    batches.
    """
    mask = torch.cat([prompt_mask.bool(), answers != IGNORED], dim=1)
    order = torch.argsort(~mask, dim=1, stable=True)
    mask = mask.gather(1, order)
    return {
        "input_ids": whole.gather(1, order).masked_fill(~mask, pad),
        "attention_mask": mask.long(),
        "labels": labels.gather(1, order).masked_fill(~mask, IGNORED),
    }
