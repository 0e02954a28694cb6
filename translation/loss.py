"""The training loss: the mean over all target tokens of the optimizer step, on all ranks and micro-batches together."""

import torch
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import Seq2SeqLMOutput


class GlobalTokenMean:
    """A `compute_loss_func` for the Trainer: token cross-entropy, summed here, divided by the step's token count.

    The Trainer counts `num_items_in_batch` over every micro-batch and rank, multiplies what this returns by the number
    of ranks (gradients are averaged over them) and does not divide by the accumulation steps. Left to itself it does
    the same to T5's own loss, a mean over one micro-batch already, which so comes out ranks x steps too large.
    """

    def __init__(self, label_smoothing: float = 0.0):
        self.label_smoothing = label_smoothing

    def __call__(
        self, outputs: Seq2SeqLMOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int
    ) -> torch.Tensor:
        """The micro-batch's share of the loss: a scalar in fp32, nats per token.

        `outputs.logits` is (batch, length, vocabulary); `labels` is (batch, length), -100 where there is no target.
        """
        logits = outputs.logits.flatten(0, 1).float()
        total = cross_entropy(
            logits, labels.flatten(), ignore_index=-100, reduction="sum", label_smoothing=self.label_smoothing
        )
        return total / num_items_in_batch
