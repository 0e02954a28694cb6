"""The built-in corpus: the Python standard library's own source, and a tokenizer trained on it."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from translation.records import InputError

# Not used: tests, bundled tools, data tables written as code.
_LEFT_OUT = {
    "test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3", "turtledemo",
    "ensurepip", "encodings",
    "pydoc_data", "__pycache__", "_vendor", "config",
}  # fmt: skip
_LONGEST = 200_000  # characters
_HELD_OUT_OF = 12  # one file in 12 is held out
END, PAD = "<|end|>", "<|pad|>"


class Corpus(NamedTuple):
    """Source files: for training, and held out."""

    train: list[str]
    held_out: list[str]


def standard_library() -> Corpus:
    """Read the running Python's standard library. Only the name of a file decides whether it is
    held out.

    Raises:
        InputError: this Python has no source of its library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    corpus = Corpus([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _LEFT_OUT & set(name.parts) or path.stat().st_size > _LONGEST:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        bucket = int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16) % _HELD_OUT_OF
        (corpus.held_out if bucket == 0 else corpus.train).append(text)
    if not corpus.train or not corpus.held_out:
        raise InputError(
            f"no source files in {root}: this Python has no library source; give --train_file "
            "instead"
        )
    return corpus


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens.

    `<|end|>` ends a document, `<|pad|>` pads.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        bos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
