"""From text, JSON lines, dialogues and pairs to token ids, and from token ids to batches.

A causal example is a list of text segments. A segment is learnt, or only read (a user's turn). The
example becomes `input_ids` and `labels`; labels are -100 where nothing is to be learnt. An
encoder-decoder example is a source and a target."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from distill.batch import IGNORED, TARGET_COUNTS, target_mask
from distill.cache import EXAMPLE_KEYS, example_keys
from translation.records import InputError
from translation.tokenizer import token_id

PLAIN_TEXT = (".txt", ".py", ".md")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("input",
    "output"),
          ("source", "target"), ("user", "assistant"))  # fmt: skip


class Segment(NamedTuple):
    """A piece of text, whether it is learnt, and whether a chat template has written it, with all
    special tokens.
    """

    text: str
    learnt: bool
    templated: bool = False


class Pair(NamedTuple):
    """The text that the encoder reads, and the text that the decoder learns to write."""

    source: str
    target: str


def read_records(name: str, split: str) -> Iterator[tuple[str, object]]:
    """Yield (where, record) from a file, a folder of text files, or a dataset's name. Messages
    begin with `where`.

    Raises:
        InputError: there is no such file, or its content does not have the format that its name
        says.
    """
    path = Path(name)
    if path.is_file():
        yield from _read_file(path)
    elif path.is_dir() and (files := sorted(p for p in path.rglob("*") if p.suffix in PLAIN_TEXT)):
        for file in files:
            yield from _read_file(file)
    else:
        yield from _read_dataset(name, split)


def _read_file(path: Path) -> Iterator[tuple[str, object]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); convert it"
        ) from None
    if path.suffix in PLAIN_TEXT:
        yield str(path), {"text": text}
        return
    if path.suffix not in (".json", ".jsonl"):
        raise InputError(
            f"{path}: unknown kind of file; its name must end in .json, .jsonl or "
            f"{', '.join(PLAIN_TEXT)}"
        )
    if path.suffix == ".json" and text.lstrip().startswith("["):
        try:
            records = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from None
        yield from (
            (f"{path}, record {number}", record) for number, record in enumerate(records, start=1)
        )
        return
    # `splitlines` would also split at characters that JSON allows in a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: not valid JSON ({error.msg})") from None


def _read_dataset(name: str, split: str) -> Iterator[tuple[str, object]]:
    try:
        try:
            found = datasets.load_from_disk(name)
        except FileNotFoundError:
            found = datasets.load_dataset(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name}: neither a file nor a dataset that can be loaded ({error})"
        ) from error
    if isinstance(found, datasets.DatasetDict | datasets.IterableDatasetDict):
        if split not in found:
            names = ", ".join(map(str, found))
            raise InputError(f"{name} has no split {split!r}, only {names}")
        found = found[split]
    yield from (
        (f"{name}, record {number}", record) for number, record in enumerate(found, start=1)
    )


# -- causal models


def segments_of(record: object, where: str, tokenizer: PreTrainedTokenizerBase) -> list[Segment]:
    """Return the segments of one record: text, a prompt with its answer, or a dialogue.

    A dialogue is `messages` (or `conversations`) with roles, or a list of texts of user and
    assistant in turn. The assistant's turns are learnt, except for what the template already writes
    as a prompt for them. The tokenizer's chat template formats it; without one it becomes "role:
    text" lines.

    Raises:
        InputError: the record is none of these.
    """
    if isinstance(record, str):
        return [Segment(record, True)]
    if isinstance(record, Mapping):
        if isinstance(record.get("text"), str):
            return [Segment(record["text"], True)]
        for key in ("messages", "conversations", "dialogue", "turns"):
            if isinstance(record.get(key), Sequence) and record[key]:
                return _dialogue(record[key], f"{where}, {key}", tokenizer)
        for prompt, answer in _PAIRS:
            if isinstance(record.get(prompt), str) and isinstance(record.get(answer), str):
                return _dialogue([record[prompt], record[answer]], where, tokenizer)
        found = ", ".join(map(str, record))
        raise InputError(
            f"{where}: no text, messages or prompt and response in it; its keys are {found}"
        )
    if isinstance(record, Sequence) and record:
        return _dialogue(record, where, tokenizer)
    raise InputError(
        f"{where}: a record must be an object with text or messages, or a list of turns"
    )


def _dialogue(
    turns: Sequence[object], where: str, tokenizer: PreTrainedTokenizerBase
) -> list[Segment]:
    messages = [
        message for number, turn in enumerate(turns) for message in _messages(turn, number, where)
    ]
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(f"{where}: the assistant says nothing, so there is nothing to learn")
    if tokenizer.chat_template is None:
        return [
            Segment(f"{message['role']}: {message['content']}\n", message["role"] == "assistant")
            for message in messages
        ]
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    try:
        whole = [str(render(messages[: i + 1])) for i in range(len(messages))]
    except TemplateError as error:
        raise InputError(f"{where}: the tokenizer's chat template says: {error}") from error
    # Some templates end every dialogue with the end token.
    end = str(tokenizer.eos_token or "")
    starts = [
        text if longer.startswith(text) else text.removesuffix(end)
        for text, longer in pairwise(whole)
    ]
    if not all(longer.startswith(start) for start, longer in zip(starts, whole[1:], strict=True)):
        raise InputError(
            f"{where}: the tokenizer's chat template writes a turn differently once another "
            "one follows, so the turns cannot be told apart: give the tokenizer a template "
            "that writes it in the same way"
        )
    segments: list[Segment] = []
    for i, (start, text) in enumerate(pairwise(["", *starts, whole[-1]])):
        learnt, begin = messages[i]["role"] == "assistant", len(start)
        if learnt and i:
            # What a chat gives a model to answer is read only.
            prompt = str(render(messages[:i], add_generation_prompt=True))
            if prompt != start and text.startswith(prompt):
                segments.append(Segment(prompt[begin:], False, True))
                begin = len(prompt)
        segments.append(Segment(text[begin:], learnt, True))
    return segments


def _messages(turn: object, number: int, where: str) -> list[dict[str, str]]:
    if isinstance(turn, str):
        return [{"role": ("user", "assistant")[number % 2], "content": turn}]
    if isinstance(turn, Mapping):
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if isinstance(role, str) and isinstance(content, str):
            return [{"role": _ROLES.get(role, role), "content": content}]
        said = [
            {"role": role, "content": turn[role]}
            for role in ("user", "assistant")
            if isinstance(turn.get(role), str)
        ]
        if said:
            return said
    raise InputError(
        f"{where}, turn {number + 1}: a turn must be a string or have a role and content"
    )


def encode(segments: Sequence[Segment], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Return `input_ids` and `labels` of one example, with the end token, and with the start token
    if the tokenizer puts one before texts.

    No token spans two segments.
    """
    ids = start_tokens(segments, tokenizer)
    labels = [IGNORED] * len(ids)
    for segment in segments:
        piece = tokenizer(segment.text, add_special_tokens=False)["input_ids"]
        ids += piece
        labels += piece if segment.learnt else [IGNORED] * len(piece)
    end = token_id(tokenizer, "eos")
    if end is not None and (not ids or ids[-1] != end):
        ids.append(end)
        labels.append(end)
    return {"input_ids": ids, "labels": labels}


def start_tokens(segments: Sequence[Segment], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the start token in a list, or an empty list if the tokenizer puts none before this
    text.
    """
    start = token_id(tokenizer, "bos")
    if start is None or any(segment.templated for segment in segments):
        return []
    return [start] if tokenizer("a")["input_ids"][:1] == [start] else []


def pack(
    examples: Iterable[Mapping[str, list[int]]], length: int, pad: int
) -> list[dict[str, list[int]]]:
    """Fill blocks of `length` tokens with one example after another. An example is split where a
    block ends.

    `position_ids` start at 0 in each example, so models see where it begins. The first token of an
    example has no label, because nothing comes before it. The last block is padded with `pad`."""
    blocks: list[dict[str, list[int]]] = []
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []

    def close() -> None:
        missing = length - len(ids)
        blocks.append(
            {
                "input_ids": ids[:] + [pad] * missing,
                "labels": [IGNORED, *labels[1:], *[IGNORED] * missing],
                "position_ids": positions[:] + list(range(missing)),
            }
        )
        for each in (ids, labels, positions):
            each.clear()

    for example in examples:
        start, tokens = 0, example["input_ids"]
        while start < len(tokens):
            end = min(len(tokens), start + length - len(ids))
            ids += tokens[start:end]
            labels += [IGNORED, *example["labels"][start + 1 : end]]
            positions += range(end - start)
            start = end
            if len(ids) == length:
                close()
    if ids:
        close()
    return blocks


def cut(example: Mapping[str, list[int]], length: int) -> dict[str, list[int]]:
    """Return the first `length` tokens of an example."""
    return {name: values[:length] for name, values in example.items()}


# -- encoder-decoder models


def pair_of(record: object, where: str, source: str | None, target: str | None) -> Pair:
    """Return the two texts of a record.

    Columns may have dots: translation.en. InputError if a text is missing.
    """
    if source and target:
        texts = [_column(record, name, where) for name in (source, target)]
        return Pair(*texts)
    if isinstance(record, Mapping):
        for names in _PAIRS:
            if all(isinstance(record.get(name), str) for name in names):
                return Pair(*(record[name] for name in names))
    raise InputError(
        f"{where}: name the texts with --source_column and --target_column (for instance "
        "translation.en)"
    )


def _column(record: object, name: str, where: str) -> str:
    value = record
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise InputError(f"{where}: there is no column {name!r}")
        value = value[key]
    if not isinstance(value, str):
        raise InputError(f"{where}: {name!r} is {value!r:.40}; it must be a string")
    return value


def encode_pair(
    pair: Pair, tokenizer: PreTrainedTokenizerBase, length: int, prefix: str = ""
) -> dict[str, list[int]]:
    """Return `input_ids` of prefix and source, and `labels`, each of at most `length` tokens."""
    ids = tokenizer(prefix + pair.source, truncation=True, max_length=length)["input_ids"]
    return {
        "input_ids": ids,
        "labels": tokenizer(text_target=pair.target, truncation=True, max_length=length)[
            "input_ids"
        ],
    }


# -- batches


class Collator:
    """Pads examples on the right to the longest of the batch. `attention_mask` is 0 for padding.

    Packed examples (those with `position_ids`) have one length and no mask: positions show where
    documents begin."""

    def __init__(self, pad_token_id: int):
        self.padding = {
            "input_ids": pad_token_id, "labels": IGNORED, "attention_mask": 0,
            "teacher_input_ids": pad_token_id, "teacher_attention_mask": 0, "teacher_positions": -1,
        }  # fmt: skip

    def __call__(self, examples: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        if "position_ids" in examples[0]:
            return {
                name: torch.tensor([example[name] for example in examples]) for name in examples[0]
            }
        examples = [self._with_masks(example) for example in examples]
        batch = {}
        for name, padding in self.padding.items():
            if name in examples[0]:
                longest = max(len(example[name]) for example in examples)
                rows = [
                    example[name] + [padding] * (longest - len(example[name]))
                    for example in examples
                ]
                batch[name] = torch.tensor(rows)
        return batch

    @staticmethod
    def _with_masks(example: Mapping[str, list[int]]) -> dict[str, list[int]]:
        masks = {"attention_mask": [1] * len(example["input_ids"])}
        if "teacher_input_ids" in example:
            masks["teacher_attention_mask"] = [1] * len(example["teacher_input_ids"])
        return {**example, **masks}


class CountingCollator:
    """Wraps a data collator, and adds to its batches what the host needs to know about them.

    Batches reach the trainer on the device, where the host would have to wait for each of these:
    `target_counts`, the number of targets of each example (a list of integers), and, `with_keys`,
    `example_keys`, the keys under which a teacher cache has the examples (a list of bytes).
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], dict[str, Any]],
        shifted: bool,
        with_keys: bool = False,
    ):
        self.collate = collate
        self.shifted = shifted
        self.with_keys = with_keys

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        batch = self.collate(examples)
        if self.with_keys:
            batch[EXAMPLE_KEYS] = example_keys(batch)
        batch[TARGET_COUNTS] = target_mask(batch["labels"], self.shifted).sum(1).tolist()
        return batch
