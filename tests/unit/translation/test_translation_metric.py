"""The local metric: BLEU and chrF as they are defined. It loads without a network."""

import sys

import numpy as np
import pytest
from transformers import EvalPrediction

from translation.records import InputError
from translation.report import bleu_signature, bleu_tokenizer, make_compute_metrics
from translation.tokenizer import scored_pieces, t5_tokenizer, train_sentencepiece

SENTENCES = [
    "the cat sat on the mat",
    "a dog ran in the park",
    "one two three four five",
    "six seven eight",
]


@pytest.fixture(scope="module")
def tokenizer():
    return t5_tokenizer(scored_pieces(train_sentencepiece(SENTENCES, vocab_size=60)))


def ids(tokenizer, sentences, padding):
    rows = tokenizer(sentences).input_ids
    length = max(map(len, rows))
    return np.array([row + [padding] * (length - len(row)) for row in rows])


def test_equal_sentences_score_100(tokenizer):
    compute = make_compute_metrics(tokenizer, SENTENCES)
    # Both kinds of padding: the tokenizer's own, and -100 as the Trainer pads between batches.
    given = EvalPrediction(ids(tokenizer, SENTENCES, 0), ids(tokenizer, SENTENCES, -100))
    scores = compute(given)
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == pytest.approx(100)
    lengths = [len(row) for row in tokenizer(SENTENCES).input_ids]
    assert scores["gen_len"] == pytest.approx(np.mean(lengths), abs=0.01)


def test_references_are_those_of_the_data(tokenizer):
    """Labels are cut, and have no token for a character that the tokenizer does not know."""
    reference = "one two three four caf\u00e9"
    predictions = ids(tokenizer, ["one two three four five"], 0)
    labels = ids(tokenizer, [reference], -100)[:, :3]
    scores = make_compute_metrics(tokenizer, [reference])(EvalPrediction(predictions, labels))
    # Precisions of 1- to 4-grams: 4/5, 3/4, 2/3, 1/2. The lengths are equal, so BLEU is their
    # geometric mean.
    assert scores["bleu"] == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25, abs=1e-3)
    assert 0 < scores["chrf"] < 100


@pytest.mark.parametrize(
    "language, expected",
    [
        ("de", "13a"), (None, "13a"), ("zh", "zh"), ("zh_CN", "zh"), ("zho_Hans", "zh"),
        ("jav_Latn", "13a"), ("ja", "ja-mecab"), ("kor_Hang", "ko-mecab"), ("kok", "13a"),
    ],
)  # fmt: skip
def test_bleu_splits_words_as_the_language_needs_it(language, expected):
    assert bleu_tokenizer(language) == expected
    assert "mecab" in expected or f"tok:{expected}" in bleu_signature(language)


def test_a_missing_tokenizer_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "MeCab", None)
    with pytest.raises(InputError, match=r"(?s)BLEU of ja: .*pip install sacrebleu\[ja\]"):
        bleu_signature("ja")
