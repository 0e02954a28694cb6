"""What Seq2SeqTrainer needs so that losses and scores do not depend on the number of ranks."""

import torch
from torch.nn.functional import cross_entropy
from transformers import Seq2SeqTrainer
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.trainer_utils import EvalLoopOutput


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


class TranslationTrainer(Seq2SeqTrainer):
    """A Seq2SeqTrainer that scores every sentence once.

    To give each rank a full last batch the data loader repeats sentences. Seq2SeqTrainer counts and returns these too.
    """

    def evaluation_loop(self, *args, **kwargs) -> EvalLoopOutput:
        self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(*args, **kwargs)
