"""One forward of the script, and the parts in which it can be repeated."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
        shown: what the script has received for its outputs, by their places. The first is the loss.
        outputs: the tensors with a graph in the same places; empty if the call was split.
        weights: of the losses of its parts; [1] as long as it is whole.
    """

    run: Callable[..., Any]
    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    random: object = None
    shown: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    weights: list[float] = field(default_factory=lambda: [1.0])

    def __post_init__(self) -> None:
        bound = inspect.signature(self.module.forward).bind(*self.args, **self.kwargs)
        self._named = dict(bound.arguments)
        for name, param in bound.signature.parameters.items():
            if param.kind is param.VAR_KEYWORD:
                self._named |= self._named.pop(name, {})
        self._seen = self._versions()

    @property
    def is_written(self) -> bool:
        """Whether a buffer of the model, or a tensor among the arguments, has been written to since
        the call.
        """
        return self._seen != self._versions()

    def _versions(self) -> list[tuple[int, int]]:
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
        others = (grad for place, grad in self.gradients().items() if place or grad.dim())
        if not all(grad.dim() and len(grad) == self.rows for grad in others):
            return "the script's loss depends on an output that has no row for each sample"
        return ""

    def parts(self, number: int) -> list[slice]:
        """The samples of each part. Some are empty if there are fewer samples than parts."""
        if number == 1:
            return [slice(None)]
        bounds = [self.rows * part // number for part in range(number + 1)]
        return [slice(*each) for each in pairwise(bounds)]

    def run_part(self, part: slice) -> Any:
        """What the engine's forward returns for some of the samples; for the first one if there are
        none, because all ranks run as many forwards.
        """
        if part == slice(None):
            return self.run(*self.args, **self.kwargs)
        rows, chosen = self.rows, part if part.start < part.stop else slice(0, 1)

        def some(value: Any) -> Any:
            is_batch = isinstance(value, torch.Tensor) and value.dim() and len(value) == rows
            return value[chosen] if is_batch else value

        return self.run(*map(some, self.args), **{k: some(v) for k, v in self.kwargs.items()})

    def outputs_of(
        self, part: slice, weight: float
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs of a part that need a gradient, and these gradients."""
        leaves = tree_flatten(self.run_part(part))[0]
        found = []
        for place, grad in self.gradients().items():
            if (leaf := leaves[place]).requires_grad:
                rows = grad[part] if grad.dim() else grad * weight
                found.append((leaf, rows if rows.shape == leaf.shape else torch.zeros_like(leaf)))
        return [leaf for leaf, _ in found], [grad for _, grad in found]

    def weigh(self, counts: list[int], parts: list[slice]) -> None:
        """Set `weights`, where the losses of `parts` are the means over so many labels."""
        total = max(1, sum(counts))
        self.weights = [count / total for count in counts]
        if self._named.get(_COUNT) is not None:  # they are sums
            self.weights = [float(part.start < part.stop) for part in parts]

    def counted(self, output: Any, part: slice, tolerance: float) -> int:
        """How many labels the loss of a part counts.

        Raises UsageError unless it is the mean cross entropy over these labels, or its sum divided
        by the number that the script passes. Only then is the whole's loss that of its parts.
        """
        if part.start == part.stop:
            return 0
        named: Any = output if isinstance(output, dict) else {}
        logits, labels, divisor = named.get("logits"), self.labels, self._named.get(_COUNT)
        if logits is not None and labels is not None and named.get("aux_loss") is None:
            labels = labels[part].to(logits.device)
            name = getattr(getattr(self.module, "loss_function", None), "__name__", "")
            seq2seq = getattr(getattr(self.module, "config", None), "is_encoder_decoder", False)
            if name == "ForCausalLMLoss" and not seq2seq:  # each token predicts the next one
                labels, logits = labels[:, 1:], logits[:, :-1]
            if labels.shape == logits.shape[:-1]:
                count, classes = int((labels != IGNORED).sum()), logits.flatten(0, -2).float()
                total = nn.functional.cross_entropy(classes, labels.flatten(), reduction="sum")
                usual = total / (count if divisor is None else divisor)
                loss = named["loss"].float()
                if torch.isclose(loss, usual, rtol=tolerance, equal_nan=True):
                    return count
        raise unsplittable("its loss is not the mean over its labels")


def unsplittable(why: str) -> UsageError:
    """The error of a micro-batch that has room in parts only, and must stay whole."""
    return UsageError(
        f'{KEY} "adapt": a micro-batch that has no room as a whole cannot be split: {why}. Use a '
        "smaller train_micro_batch_size_per_gpu with more gradient_accumulation_steps"
    )
