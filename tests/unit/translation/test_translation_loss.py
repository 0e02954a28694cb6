"""The loss is the mean over all target tokens of a step, however the step is divided into
micro-batches.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.trainer_pt_utils import LabelSmoother

from translation.trainer import GlobalTokenMean


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


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_micro_batches_add_up_to_the_mean_over_tokens(batch, parts):
    logits, labels = batch
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten())
    tokens = (labels != -100).sum()
    pieces = zip(logits.chunk(parts), labels.chunk(parts), strict=True)
    losses = [
        GlobalTokenMean()(Seq2SeqLMOutput(logits=x), y, num_items_in_batch=tokens)
        for x, y in pieces
    ]
    torch.testing.assert_close(sum(losses), expected)


def test_label_smoothing_is_that_of_transformers(batch):
    logits, labels = batch
    outputs = Seq2SeqLMOutput(logits=logits)
    expected = LabelSmoother(epsilon=0.1)(outputs, labels.clone())
    loss = GlobalTokenMean(0.1)(outputs, labels, num_items_in_batch=(labels != -100).sum())
    torch.testing.assert_close(loss, expected)


def test_16_bit_logits_are_summed_in_fp32(batch):
    logits, labels = batch
    loss = GlobalTokenMean()(
        Seq2SeqLMOutput(logits=logits.bfloat16()), labels, num_items_in_batch=1
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss,
        cross_entropy(logits.bfloat16().float().flatten(0, 1), labels.flatten(), reduction="sum"),
    )
