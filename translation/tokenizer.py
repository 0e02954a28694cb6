"""A SentencePiece vocabulary trained on a corpus, the transformers tokenizer made from it, and the
ids of a tokenizer's special tokens."""

import io
from collections.abc import Iterable

import sentencepiece
from transformers import PreTrainedTokenizerBase, T5Tokenizer

from translation.records import InputError

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"


def train_sentencepiece(
    sentences: Iterable[str], vocab_size: int, character_coverage: float = 1.0
) -> sentencepiece.SentencePieceProcessor:
    """Train a unigram model with T5's special pieces (pad 0, end of sentence 1, unknown 2).

    `vocab_size` is an upper limit: a small corpus gets fewer pieces. `character_coverage` is the
    fraction of all characters that get a piece. The rarest ones are unknown. There is no Unicode
    normalisation, as in T5Tokenizer."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="unigram",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=character_coverage,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece=PAD,
        eos_piece=EOS,
        unk_piece=UNK,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def scored_pieces(model: sentencepiece.SentencePieceProcessor) -> list[tuple[str, float]]:
    """Return the vocabulary in the order of ids: each piece with its log probability."""
    return [
        (model.id_to_piece(index), model.get_score(index))
        for index in range(model.get_piece_size())
    ]


def t5_tokenizer(pieces: list[tuple[str, float]]) -> T5Tokenizer:
    """Make a tokenizer with the ids of the SentencePiece model, which ends each text with the
    end-of-sentence token.

    It is made from the pieces, because `T5Tokenizer(vocab_file=...)` ignores the file's vocabulary.
    """
    return T5Tokenizer(vocab=pieces, extra_ids=0)


def token_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int | None:
    """Return the id of a special token ("pad", "eos", "bos", "unk"), or None if there is none."""
    index = getattr(tokenizer, f"{name}_token_id")
    return index if isinstance(index, int) else None


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the padding token.

    Raises:
        InputError: the tokenizer has none, so sentences of different lengths cannot form a batch.
    """
    index = token_id(tokenizer, "pad")
    if index is None:
        raise InputError(
            f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no padding "
            "token: set pad_token in its tokenizer_config.json"
        )
    return index
