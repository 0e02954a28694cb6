"""Makes losses and scores of Seq2SeqTrainer independent of the number of ranks."""

from collections.abc import Sized
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, SequentialSampler
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
    """A Seq2SeqTrainer that scores every sentence once, and whose `eval_loss` is the mean over the
    tokens of the whole evaluation set, as that of training is over those of a step.

    The data loader repeats sentences, so that each rank has a full last batch. Seq2SeqTrainer
    counts these too, and averages the means of batches. `compute_loss_func` must be one that
    divides a sum by `num_items_in_batch`, such as `GlobalTokenMean`."""

    args: Seq2SeqTrainingArguments
    processing_class: PreTrainedTokenizerBase

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        self.gather_function = self.accelerator.gather_for_metrics
        self._sums: list[torch.Tensor] = []
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        loss, tokens = torch.cat(self._sums).sum(0, dtype=torch.float64).tolist()
        metrics = {**(output.metrics or {}), f"{metric_key_prefix}_loss": loss / max(1, tokens)}
        return output._replace(metrics=metrics)

    @torch.no_grad()
    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return the batch's loss, the generated tokens if they are asked for, and the labels. The
        losses of all ranks' sentences go to `evaluation_loop`.
        """
        inputs = self._prepare_inputs(inputs)
        labels = inputs.pop("labels")
        tokens = None
        if self.args.predict_with_generate and not prediction_loss_only:
            sources = {name: inputs[name] for name in inputs if not name.startswith("decoder_")}
            _, tokens, _ = super().prediction_step(
                model, sources, prediction_loss_only, ignore_keys, **gen_kwargs
            )
        with self.compute_loss_context_manager():
            logits = model(**inputs).logits
        sums = [self._sum(*sentence) for sentence in zip(logits, labels, strict=True)]
        counts = (labels != -100).sum(1)
        scored = torch.stack([torch.stack(sums).float(), counts.float()], dim=1)
        gathered = cast(torch.Tensor, self.accelerator.gather_for_metrics(scored))
        self._sums.append(gathered.cpu())
        return scored[:, 0].sum() / counts.sum().clamp_min(1), tokens, labels

    def _sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of one sentence's tokens."""
        assert self.compute_loss_func is not None
        output = Seq2SeqLMOutput(logits=cast(torch.FloatTensor, logits.unsqueeze(0)))
        return self.compute_loss_func(output, labels.unsqueeze(0), num_items_in_batch=1)

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler:
        """Keep the dataset's order, in which predictions are written, even if batches of training
        are grouped by length.
        """
        return SequentialSampler(cast(Sized, eval_dataset))
