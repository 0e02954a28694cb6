"""Makes losses and scores of Seq2SeqTrainer independent of the number of ranks."""

from collections.abc import Sized
from typing import cast

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, SequentialSampler
from transformers import PreTrainedTokenizerBase, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.trainer_utils import EvalLoopOutput


class GlobalTokenMean:
    """A `compute_loss_func` for the Trainer: the sum of token cross-entropies, divided by the
    step's token count.

    The Trainer counts `num_items_in_batch` over all micro-batches and ranks. It multiplies this
    loss by the number of ranks, because gradients are averaged over ranks, and does not divide by
    the accumulation steps. It does the same to T5's own loss, but that is already a mean over one
    micro-batch, so it becomes ranks x steps times too large."""

    def __init__(self, label_smoothing: float = 0.0):
        self.label_smoothing = label_smoothing

    def __call__(
        self, outputs: Seq2SeqLMOutput, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int
    ) -> torch.Tensor:
        """Return the micro-batch's share of the loss: a scalar in fp32, in nats per token.

        `outputs.logits`: (batch, length, vocabulary). `labels`: (batch, length), -100 for no
        target."""
        assert outputs.logits is not None
        logits = outputs.logits.flatten(0, 1).float()
        total = cross_entropy(
            logits,
            labels.flatten(),
            ignore_index=-100,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return total / num_items_in_batch


class TranslationTrainer(Seq2SeqTrainer):
    """A Seq2SeqTrainer that scores every sentence once.

    The data loader repeats sentences, so that each rank has a full last batch. Seq2SeqTrainer
    counts these too."""

    args: Seq2SeqTrainingArguments
    processing_class: PreTrainedTokenizerBase

    def evaluation_loop(self, *args, **kwargs) -> EvalLoopOutput:
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler:
        """Keep the dataset's order, in which predictions are written, even if batches of training
        are grouped by length.
        """
        return SequentialSampler(cast(Sized, eval_dataset))
