"""The loss is the mean over all target tokens of a step, however the step is divided into
micro-batches.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.trainer_pt_utils import LabelSmoother

from translation.tokenizer import EOS, PAD, UNK, t5_tokenizer
from translation.trainer import GlobalTokenMean, TranslationTrainer


@pytest.fixture
def batch():
    """Return logits (6, 5, 11) and labels of very different lengths.

    So a mean of means would be another number.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, 11, generator=generator)
    labels = torch.randint(11, (6, 5), generator=generator)
    for row, length in enumerate([5, 1, 1, 4, 2, 1]):
        labels[row, length:] = -100
    return logits, labels


def test_label_smoothing_is_that_of_transformers(batch):
    logits, labels = batch
    outputs = Seq2SeqLMOutput(logits=logits)
    expected = LabelSmoother(epsilon=0.1)(outputs, labels.clone())
    loss = GlobalTokenMean(0.1)(outputs, labels, num_items_in_batch=(labels != -100).sum())
    torch.testing.assert_close(loss, expected)


def test_16_bit_logits_are_summed_in_fp32(batch):
    logits, labels = batch
    logits = logits.bfloat16()
    loss = GlobalTokenMean()(Seq2SeqLMOutput(logits=logits), labels, num_items_in_batch=1)
    assert loss.dtype == torch.float32
    flat = logits.float().flatten(0, 1)
    torch.testing.assert_close(loss, cross_entropy(flat, labels.flatten(), reduction="sum"))


@pytest.mark.parametrize("generates", [False, True])
def test_the_evaluation_loss_is_the_mean_over_all_tokens(generates, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1}
    model = T5ForConditionalGeneration(T5Config(**sizes, num_heads=2, decoder_start_token_id=0))
    torch.nn.init.normal_(model.lm_head.weight)
    rows = [{"input_ids": [3, 4], "labels": [4 + i] * (1 + 7 * (i % 2))} for i in range(7)]
    total, tokens = 0.0, 0
    for row in rows:
        labels = torch.tensor([row["labels"]])
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([row["input_ids"]]), labels=labels).logits
        options = {"reduction": "sum", "label_smoothing": 0.1}
        total += cross_entropy(logits[0], labels[0], **options).item()
        tokens += labels.numel()
    tokenizer = t5_tokenizer([(piece, 0.0) for piece in (PAD, EOS, UNK)])
    for size in (1, 2, 8):
        arguments = Seq2SeqTrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", per_device_eval_batch_size=size,
            predict_with_generate=generates, generation_max_length=4, label_smoothing_factor=0.1,
        )  # fmt: skip
        trainer = TranslationTrainer(
            model=model, args=arguments, eval_dataset=rows, processing_class=tokenizer,
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            compute_loss_func=GlobalTokenMean(0.1),
            compute_metrics=lambda result: {"sentences": len(result.predictions)},
        )  # fmt: skip
        metrics = trainer.evaluate()
        assert metrics["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)
        if generates:
            assert metrics["eval_sentences"] == len(rows)
