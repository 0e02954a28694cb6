"""One forward of the script, and the parts in which it can be repeated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from zero.errors import UsageError

KEY = "on_out_of_memory"
IGNORED = -100  # labels that transformers' losses do not count
# Arguments of transformers' models whose first dimension is the sample.
_OF_SAMPLES = frozenset(
    "input_ids inputs_embeds attention_mask token_type_ids position_ids labels decoder_input_ids "
    "decoder_inputs_embeds decoder_attention_mask pixel_values".split()
)
_COUNT = "num_items_in_batch"


@dataclass
class Call:
    """A forward of the script.

    Attributes:
        run: the engine's own forward.
        module: the model, whose signature names the arguments.
        random: the states of the generators before it.
        seen: what is known of buffers and of the arguments before it: see `versions`.
        shown: what the script has received for its outputs, by their places. The first is the loss.
        outputs: the tensors with a graph in the same places; empty if the call was split.
        is_split: its loss has been computed in parts.
    """

    run: Callable[..., Any]
    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    random: object = None
    shown: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    is_split: bool = False

    def __post_init__(self) -> None:
        bound = inspect.signature(self.module.forward).bind(*self.args, **self.kwargs)
        self._named = dict(bound.arguments)
        for name, param in bound.signature.parameters.items():
            if param.kind is param.VAR_KEYWORD:
                self._named |= self._named.pop(name, {})
        self.seen = self.versions()

    def versions(self) -> list[tuple[int, int]]:
        """What changes when a buffer of the model or a tensor among the arguments is written."""
        tensors = [*self.module.buffers(), *tree_flatten((self.args, self.kwargs))[0]]
        return [
            (id(each), 0 if each.is_inference() else each._version)
            for each in tensors
            if isinstance(each, torch.Tensor)
        ]

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients of the outputs, by their places."""
        found = {place: shown.grad for place, shown in self.shown.items()}
        return {place: grad for place, grad in found.items() if grad is not None}

    # -- parts of the micro-batch

    @property
    def rows(self) -> int:
        """The number of samples in the micro-batch."""
        given = (self._named.get(name) for name in ("input_ids", "inputs_embeds", "pixel_values"))
        return next((len(each) for each in given if isinstance(each, torch.Tensor)), 1)

    @property
    def labels(self) -> torch.Tensor | None:
        return self._named.get("labels")

    def why_whole(self) -> str:
        """Say why the samples cannot be told apart; empty if they can."""
        for name, value in self._named.items():
            is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
            if is_tensor and name in _OF_SAMPLES:
                if len(value) not in (1, self.rows) or (name == "position_ids" and value.dim() > 2):
                    return f"argument {name!r} has no row for each sample"
            elif name != _COUNT and not isinstance(value, (bool, type(None))):
                return f"argument {name!r} is not known to have a row for each sample"
        if self.labels is None or self.labels.is_floating_point():
            return "the forward gets no argument labels, or they are no classes"
        if not all(grad.dim() and len(grad) == self.rows for grad in self._other_gradients()):
            return "the script's loss depends on an output that has no row for each sample"
        return ""

    def _other_gradients(self) -> Iterator[torch.Tensor]:
        return (grad for place, grad in self.gradients().items() if place or grad.dim())

    def run_rows(self, chosen: slice) -> Any:
        """What the engine's forward returns for some of the samples, or for all."""
        if chosen == slice(None):
            return self.run(*self.args, **self.kwargs)
        rows = self.rows

        def some(value: Any) -> Any:
            is_batch = isinstance(value, torch.Tensor) and value.dim() and len(value) == rows
            return value[chosen] if is_batch else value

        return self.run(*map(some, self.args), **{k: some(v) for k, v in self.kwargs.items()})

    def outputs_of(
        self, chosen: slice, weight: float | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs of some samples that need a gradient, and these gradients. `weight` is that
        of the samples' loss; None if all gradients are zero.
        """
        leaves = tree_flatten(self.run_rows(chosen))[0]
        outputs, grads = [], []
        for place, grad in self.gradients().items():
            if leaves[place].requires_grad:
                outputs.append(leaves[place])
                rows = grad[chosen] * (weight is not None) if grad.dim() else grad * (weight or 0.0)
                grads.append(rows)
        return outputs, grads

    def parts(self, number: int) -> Iterator[tuple[slice, float | None]]:
        """The samples of each part, and what its loss counts. None: there are fewer samples than
        parts, and one is repeated, because all ranks run as many backwards.
        """
        if number == 1:
            yield slice(None), 1.0
            return
        is_sum = self._named.get(_COUNT) is not None
        counts = self._counted().sum(1).tolist()
        for start, end in pairwise(self.rows * part // number for part in range(number + 1)):
            if start == end:
                yield slice(0, 1), None
                continue
            share = sum(counts[start:end]) / max(1, sum(counts))
            yield slice(start, end), 1.0 if is_sum else share

    @property
    def _predicts_next(self) -> bool:
        """Whether the model shifts the labels by one before it counts them."""
        loss: Any = getattr(self.module, "loss_function", None)
        seq2seq = getattr(getattr(self.module, "config", None), "is_encoder_decoder", False)
        return getattr(loss, "__name__", "") == "ForCausalLMLoss" and not seq2seq

    def _counted(self) -> torch.Tensor:
        """Which labels of each sample its loss counts: samples x labels."""
        assert self.labels is not None
        counted = self.labels != IGNORED
        if self._predicts_next and counted.dim() > 1:
            counted[:, 0] = False
        return counted.reshape(self.rows, -1)

    def require_mean(self, output: Any, chosen: slice, tolerance: float) -> None:
        """Raise UsageError unless the loss of some samples is the mean cross entropy over their
        labels, or its sum divided by the number that the script passes. Only then is the whole's
        loss that of its parts.
        """
        named: Any = output if isinstance(output, dict) else {}
        logits, count = named.get("logits"), self._named.get(_COUNT)
        is_known = logits is not None and named.get("aux_loss") is None
        if is_known and self.labels is not None:
            labels = self.labels[chosen].to(logits.device)
            if self._predicts_next:
                labels, logits = labels[:, 1:], logits[:, :-1]
            if is_known := labels.shape == logits.shape[:-1]:
                classes = logits.flatten(0, -2).float()
                total = nn.functional.cross_entropy(classes, labels.flatten(), reduction="sum")
                usual = total / ((labels != IGNORED).sum() if count is None else count)
                loss = named["loss"].float()
                is_known = bool(torch.isclose(loss, usual, rtol=tolerance, equal_nan=True))
        if not is_known:
            raise unsplittable("its loss is not the mean over its labels")


def unsplittable(why: str) -> UsageError:
    """The error of a micro-batch that has room in parts only, and must stay whole."""
    return UsageError(
        f'{KEY} "adapt": a micro-batch that has no room as a whole cannot be split: {why}. Use a '
        "smaller train_micro_batch_size_per_gpu with more gradient_accumulation_steps"
    )
