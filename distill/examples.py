"""From records to examples: token ids in Arrow files that are mapped into memory, so that the
memory of a rank does not grow with the corpus. The main process of each node makes the files, and
later runs find them in the cache of `datasets`.

With streaming there are no files, and examples are made while they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

import torch.distributed as dist
from datasets import Dataset, Features, IterableDataset, Value
from datasets.config import HF_DATASETS_CACHE
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase, TrainingArguments

from distill import data
from distill.alignment import encode_twice
from distill.batch import IGNORED
from distill.config import DistillationConfig
from translation.records import InputError, Records
from translation.tokenizer import pad_token_id

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Examples = Dataset | IterableDataset

# Of the examples that are in memory at a time while they are written.
_TOKENS = 2**19


@dataclass(frozen=True)
class Encoding:
    """How records become examples.

    Attributes: tokenizer: the student's. length: the most tokens of an example. packs: whether
    examples of causal models are packed into blocks. teacher_tokenizer: encode by this one, too.
    pairs: whether the model is an encoder-decoder; then `columns` are the keys of its two texts,
    and `prefix` comes before every source. text_column: the key of a causal model's texts.
    first_tokens, first_examples: read no more than these. version: examples of another version of
    this module are made again.
    """

    tokenizer: PreTrainedTokenizerBase
    length: int
    packs: bool = True
    teacher_tokenizer: PreTrainedTokenizerBase | None = None
    pairs: bool = False
    columns: tuple[str | None, str | None] = (None, None)
    prefix: str = ""
    text_column: str | None = None
    first_tokens: int | None = None
    first_examples: int | None = None
    version: int = 1

    def features(self) -> Features:
        names = ["input_ids", "labels"]
        if self.teacher_tokenizer is not None:
            names += ["teacher_input_ids", "teacher_positions"]
        elif self.packs and not self.pairs:
            names += ["position_ids"]
        return Features({name: [Value("int32")] for name in names})


def encoding_of(
    args: DistillationConfig,
    tokenizer: PreTrainedTokenizerBase,
    pairs: bool,
    teacher_tokenizer: PreTrainedTokenizerBase | None = None,
) -> Encoding:
    """Return how records become examples, by the arguments. Where models write answers, examples
    are not packed.

    Raises:
        InputError: an argument has no meaning for this kind of model.
    """
    other = "causal models, and the student is an encoder-decoder"
    names = ["text_column"]
    if not pairs:
        other = "encoder-decoder models, and the student is causal"
        names = ["source_column", "target_column", "source_prefix"]
    if given := [name for name in names if getattr(args, name)]:
        raise InputError(f"--{given[0]} is for {other}: leave it out")
    return Encoding(
        tokenizer,
        args.max_length,
        args.packing and not (args.lmbda or args.seq_kd),
        teacher_tokenizer,
        pairs,
        (args.source_column, args.target_column),
        args.source_prefix or "",
        args.text_column,
    )


def with_tokens(
    args: DistillationConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    pairs: bool,
    teacher_tokenizer: PreTrainedTokenizerBase | None,
    dataset: Any,
    name: str,
) -> Any:
    """Return a Trainer's dataset of token ids as it is, and for one of records its examples.

    Raises:
        ValueError: there is no tokenizer for them.
    """
    if isinstance(dataset, dict):
        encode = partial(with_tokens, args, tokenizer, pairs, teacher_tokenizer)
        return {key: encode(each, f"{name} {key}") for key, each in dataset.items()}
    if not isinstance(dataset, Examples):
        return dataset
    columns = dataset.column_names or [*next(iter(dataset), {})]
    if "input_ids" in columns:
        return dataset
    if tokenizer is None:
        raise ValueError(
            f"{name} has the columns {', '.join(columns)} and no input_ids: give processing_class, "
            "the tokenizer"
        )
    encoding = encoding_of(args, tokenizer, pairs, teacher_tokenizer)
    records = Records(name, dataset=dataset)
    if isinstance(dataset, IterableDataset):
        return stream_examples(records, encoding)
    return make_examples(lambda: records, encoding, args)


def make_examples(
    open_records: Callable[[], Records],
    encoding: Encoding,
    args: TrainingArguments,
    cache_dir: str | None = None,
) -> Dataset:
    """Return the token ids of all records: packed blocks, single examples, or pairs.

    The main process of each node makes them, or finds them in the cache, before the others. All
    ranks call this together, and an error of one is raised on all.

    Raises:
        InputError: a record has no text, there is nothing to learn, or the cache cannot be written.
    """
    made: list[Dataset] = []
    with _exchange(args.world_size) as exchange:
        for is_first in (True, False):
            failure: Exception | None = None
            if (args.local_process_index == 0) == is_first:
                try:
                    made.append(_in_files(open_records(), encoding, cache_dir))
                except InputError as error:
                    failure = error
                except Exception as error:  # may have parts that cannot be sent
                    kind = type(error).__name__
                    failure = RuntimeError(f"rank {args.process_index}: {kind}: {error}")
                    failure.__cause__ = error
            for of_rank in exchange(failure):
                if of_rank is not None:
                    raise failure or of_rank
    return made[0]


@contextmanager
def _exchange(ranks: int) -> Iterator[Callable[[Exception | None], list[Exception | None]]]:
    """Yield a function that gives all ranks the errors of all. They may wait for hours, which is
    longer than the timeout of other collectives.
    """
    if ranks == 1:
        yield lambda failure: [failure]
        return
    group = cast(Any, dist.new_group(backend="gloo", timeout=timedelta(days=30)))

    def exchange(failure: Exception | None) -> list[Exception | None]:
        failures: list[Exception | None] = [None] * ranks
        dist.all_gather_object(failures, failure, group)
        return failures

    try:
        yield exchange
    finally:
        dist.destroy_process_group(group)


def _in_files(records: Records, encoding: Encoding, cache_dir: str | None) -> Dataset:
    try:
        return Dataset.from_generator(
            read_examples,
            features=encoding.features(),
            cache_dir=cast(str, cache_dir),  # None, its default, is not of the declared type
            gen_kwargs={"records": records, "encoding": encoding},
            writer_batch_size=max(1, _TOKENS // encoding.length),
        )
    except (DatasetGenerationError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError):
            folder = cache_dir or HF_DATASETS_CACHE
            raise InputError(
                f"{records.name}: it cannot be read, or its tokens not be kept in {folder} "
                f"({cause}); --cache_dir names another folder"
            ) from error
        raise cause from None


def stream_examples(records: Records, encoding: Encoding) -> IterableDataset:
    """Return the examples of `make_examples`, which are made while they are read."""
    given = {"records": records, "encoding": encoding}
    return IterableDataset.from_generator(
        read_examples, features=encoding.features(), gen_kwargs=given
    )


def read_examples(records: Records, encoding: Encoding) -> Iterator[Mapping[str, list[int]]]:
    """Yield the examples. No more records are read than they need."""
    first = 0 if encoding.pairs else 1  # nothing comes before a causal model's first token
    tokens, learns = 0, False
    for example in islice(_encoded(records, encoding), encoding.first_examples):
        yield example
        tokens += len(example["input_ids"])
        learns = learns or any(label != IGNORED for label in example["labels"][first:])
        if encoding.first_tokens and tokens >= encoding.first_tokens:
            break
    if not learns:
        raise InputError(
            f"{records.name}: no answer begins within --max_length {encoding.length}, so there is "
            "nothing to learn; make it larger"
        )


def _encoded(records: Records, how: Encoding) -> Iterator[Mapping[str, list[int]]]:
    ours, length, name = how.tokenizer, how.length, records.name
    if how.pairs:
        pairs = (data.pair_of(record, where, *how.columns) for where, record in records)
        for pair in _with_words(pairs, lambda pair: pair.target, name):
            yield data.encode_pair(pair, ours, length, how.prefix)
        return
    texts = _with_words(
        (data.segments_of(record, where, ours, how.text_column) for where, record in records),
        lambda segments: "".join(part.text for part in segments if part.learnt),
        name,
    )
    if how.teacher_tokenizer is not None:
        for text in texts:
            yield encode_twice(text, ours, how.teacher_tokenizer, length)
        return
    whole = data.encode_all(texts, ours)
    if how.packs:
        yield from data.pack(whole, length, pad_token_id(ours))
        return
    tokens = left_out = 0
    for example in whole:
        tokens += len(example["input_ids"])
        left_out += max(0, len(example["input_ids"]) - length)
        yield data.cut(example, length)
    if left_out:
        logger.warning(
            "%s: examples are not packed here, so %d of %d tokens that come after --max_length %d "
            "are left out", name, left_out, tokens, length,
        )  # fmt: skip


def _with_words(texts: Iterable[Item], learnt: Callable[[Any], str], name: str) -> Iterator[Item]:
    """Yield the texts. Raise InputError at the end if none of them has any text to learn."""
    empty = True
    for text in texts:
        empty = empty and not learnt(text).strip()
        yield text
    if empty:
        raise InputError(f"{name}: there is nothing in it")
