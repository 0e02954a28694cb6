"""The built-in corpus and the tokenizer made from it."""

import pytest
from transformers import AutoTokenizer

from examples.demonstration.cldr import Pair, build_corpus
from translation.tokenizer import scored_pieces, t5_tokenizer, train_sentencepiece


@pytest.fixture(scope="module")
def corpus():
    return build_corpus(train_pairs=2000, held_out_pairs=200)


@pytest.fixture(scope="module")
def sentencepiece_model(corpus):
    return train_sentencepiece([text for pair in corpus.train for text in pair], vocab_size=2000)


def test_same_arguments_give_the_same_corpus(corpus):
    assert build_corpus(train_pairs=2000, held_out_pairs=200) == corpus
    assert build_corpus(train_pairs=2000, held_out_pairs=200, seed=1) != corpus


def test_splits_share_no_source_and_have_plain_spaces(corpus):
    assert [len(split) for split in corpus] == [2000, 200, 200]
    pairs = [pair for split in corpus for pair in split]
    assert len({pair.source for pair in pairs}) == len(pairs)
    assert all(text == " ".join(text.split()) for pair in pairs for text in pair)


def test_targets_are_what_cldr_says():
    pairs = {pair.source: pair.target for split in build_corpus() for pair in split}
    assert pairs["Germany"] == "Deutschland"
    assert pairs["October"] == "Oktober"
    past = [(source, target) for source, target in pairs.items() if source.endswith(" weeks ago")]
    assert len(past) > 20
    for source, target in past:
        assert target == f"vor {source.split()[0]} Wochen"


def test_other_languages():
    other = build_corpus("fr", "es", train_pairs=500, held_out_pairs=10)
    assert Pair("Allemagne", "Alemania") in other.train
    with pytest.raises(ValueError, match="no language 'xx'"):
        build_corpus("en", "xx")


def test_tokenizer_gives_the_ids_of_sentencepiece(corpus, sentencepiece_model):
    tokenizer = t5_tokenizer(scored_pieces(sentencepiece_model))
    assert len(tokenizer) == sentencepiece_model.get_piece_size()
    for pair in corpus.train + corpus.test:
        for text in pair:
            ids = tokenizer(text).input_ids
            assert ids == [*sentencepiece_model.encode(text), tokenizer.eos_token_id]
            assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_survives_saving(corpus, sentencepiece_model, tmp_path):
    tokenizer = t5_tokenizer(scored_pieces(sentencepiece_model))
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == len(tokenizer)
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2)
    for pair in corpus.test:
        assert loaded(pair.target).input_ids == tokenizer(pair.target).input_ids
