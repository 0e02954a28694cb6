"""Which of the teacher's layers a student is made of, if only their number is given: those that
change their input most (Block Influence of ShortGPT, arXiv 2403.03853)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from distill.batch import IGNORED, Batch, with_decoder_inputs
from distill.student import stacks
from distill.teacher import LiveTeacher


def block_influence(
    teacher: LiveTeacher, batches: Iterable[Mapping[str, torch.Tensor]]
) -> dict[str, list[float]]:
    """Return for each stack of the teacher how much each layer changes its input: the mean of
    1 - cosine(input, output) over the tokens of the batches.
    """
    model = teacher.model
    pairs = model.config.is_encoder_decoder
    decoder = set(model.get_decoder().modules()) if pairs else set()
    found = stacks(model)
    sums = {name: torch.zeros(len(layers)) for name, layers in found.items()}
    tokens = dict.fromkeys(found, 0)
    for inputs in batches:
        moved = {name: value.to(teacher.device) for name, value in inputs.items()}
        batch = Batch.of(with_decoder_inputs(moved, model), not pairs)
        changes: dict[tuple[str, int], torch.Tensor] = {}
        with ExitStack() as hooks:
            for name, layers in found.items():
                for index, layer in enumerate(layers):
                    keep = partial(_keep_change, changes, (name, index))
                    hooks.callback(layer.register_forward_hook(keep, with_kwargs=True).remove)
            teacher.observe(batch.teacher, batch.rows)
        for name, layers in found.items():
            ids = batch.teacher["input_ids"]
            read = batch.teacher.get("attention_mask", torch.ones_like(ids)).bool()
            if layers[0] in decoder:
                read = moved["labels"] != IGNORED
            tokens[name] += int(read.sum())
            sums[name] += torch.stack(
                [changes[name, index][read].sum().cpu() for index in range(len(layers))]
            )
    return {name: (sums[name] / tokens[name]).tolist() for name in found}


def _keep_change(
    changes: dict[tuple[str, int], torch.Tensor],
    key: tuple[str, int],
    _layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Forward hook. It replaces what it kept before, because a first batch runs twice, the first
    time to test the teacher's head.
    """
    before = args[0] if args else kwargs["hidden_states"]
    after = output[0] if isinstance(output, tuple) else output
    changes[key] = 1 - cosine_similarity(before.float(), after.float(), dim=-1)


def most_influential(influence: Mapping[str, Sequence[float]], count: int) -> dict[str, list[int]]:
    """Return the `count` layers of each stack with the greatest influence, in their order."""
    return {
        name: sorted(sorted(range(len(layers)), key=layers.__getitem__)[-count:])
        for name, layers in influence.items()
    }
