"""From text, JSON lines, dialogues and pairs to token ids, and from token ids to batches.

A causal example is a text in segments. A segment is learnt, or only read (a user's turn). The
example becomes `input_ids` and `labels`; labels are -100 where nothing is to be learnt. An
encoder-decoder example is a source and a target."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice, pairwise, takewhile
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from distill.batch import IGNORED, TARGET_COUNTS, target_mask
from distill.cache import EXAMPLE_KEYS, example_keys
from translation.records import InputError, text_of
from translation.tokenizer import token_id

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_PAIRS = (
    ("prompt", "response"), ("prompt", "completion"), ("instruction", "output"),
    ("input", "output"), ("source", "target"), ("user", "assistant"),
)  # fmt: skip
# No characters of any text (Unicode's noncharacters), to mark parts of what a template writes.
_BEGIN, _END, _READ = "\ufdd0", "\ufdd1", "\ufdd2"
_GENERATION = re.compile(r"\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}")
# Enough for the threads of a tokenizer, and few for the memory of long texts.
TEXTS_AT_A_TIME = 32
_BEFORE_ANSWER = re.compile(r"\A\s*(<think>\s*)?|</think>\s*")
# How a dialogue is written for a tokenizer without a chat template.
_LINES = (
    "{% for message in messages %}{{ message.role + ': ' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '\n' }}"
    "{% endgeneration %}{% else %}{{ message.content + '\n' }}{% endif %}{% endfor %}"
)


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


# -- causal models


def segments_of(
    record: object, where: str, tokenizer: PreTrainedTokenizerBase, column: str | None = None
) -> list[Segment]:
    """Return the segments of one record: text, a prompt with its answer, or a dialogue. `column`:
    the key of its text; others are not read then.

    A dialogue is `messages` (or `conversations`) with roles, a list of texts of user and assistant
    in turn, or two lists of messages, `prompt` and `completion`, of which the first is only read.
    The record's `system`, `tools` and `chat_template_kwargs` go to the chat template.

    Raises:
        InputError: the record is none of these.
    """
    if column is not None:
        record = text_of(record, where, "--text_column", column)
    if isinstance(record, str):
        return [Segment(record, True)]
    if isinstance(record, Sequence) and record:
        return _dialogue([], _messages(record, where), where, tokenizer)
    if not isinstance(record, Mapping):
        raise InputError(
            f"{where}: a record must be an object with text or messages, or a list of turns"
        )
    if isinstance(record.get("text"), str):
        return [Segment(record["text"], True)]
    prompt, answer = _prompt_and_answer(record, where)
    if record.get("system"):
        prompt = [{"role": "system", "content": record["system"]}, *prompt]
    options = dict(record.get("chat_template_kwargs") or {})
    if record.get("tools"):
        options["tools"] = record["tools"]
    return _dialogue(prompt, answer, where, tokenizer, **options)


def _prompt_and_answer(
    record: Mapping[str, Any], where: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages of a record that are only read, and those of which the assistant's are
    learnt.
    """
    for key in ("messages", "conversations", "dialogue", "turns"):
        if isinstance(record.get(key), list) and record[key]:
            return [], _messages(record[key], f"{where}, {key}")
    if pair := _pair_in(record):
        return _messages([pair.source], where), [{"role": "assistant", "content": pair.target}]
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return _messages(prompt, where), _messages(completion, where)
    found = ", ".join(f"{key} ({type(value).__name__})" for key, value in record.items())
    raise InputError(
        f"{where}: no text, messages or prompt and response in it; its keys are {found}; "
        "--text_column names that of the text"
    )


def _pair_in(record: Mapping[str, Any]) -> Pair | None:
    """Return a text and its answer, under the first two names that a record has of `_PAIRS`."""
    for names in _PAIRS:
        if all(isinstance(record.get(name), str) for name in names):
            source, target = (record[name] for name in names)
            if names == ("instruction", "output") and record.get("input"):  # Alpaca's records
                source = f"{source}\n{record['input']}"
            return Pair(source, target)
    return None


def _messages(turns: Sequence[object], where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        # A dataset's rows have all keys that any of them has.
        given = turn if isinstance(turn, Mapping) else {}
        given = {key: value for key, value in given.items() if value is not None}
        role = given.get("role", given.get("from"))
        content = given.get("content", given.get("value"))
        if isinstance(turn, str):
            messages.append({"role": ("user", "assistant")[number % 2], "content": turn})
        elif isinstance(role, str) and isinstance(content, str):
            messages.append({**given, "role": _ROLES.get(role, role), "content": content})
        elif role == "assistant" and content is None and given.get("tool_calls"):
            messages.append(given)
        elif said := [
            {"role": role, "content": given[role]}
            for role in ("user", "assistant")
            if isinstance(given.get(role), str)
        ]:
            messages += said
        else:
            raise InputError(
                f"{where}, turn {number + 1}: a turn must be a string or have a role and content"
            )
    return messages


def _dialogue(
    prompt: list[dict[str, Any]],
    answer: list[dict[str, Any]],
    where: str,
    tokenizer: PreTrainedTokenizerBase,
    **options: Any,
) -> list[Segment]:
    """Return a dialogue as the tokenizer's chat template writes it, or as lines if it has none.

    What the template puts into `{% generation %}` is learnt. Most templates have no such blocks.
    They write the dialogue a second time, with marks in the messages, and a segment is learnt from
    the end of the prompt for the answer (`add_generation_prompt`), so with the reasoning, or from
    the assistant's text on where the template writes no such prompt.
    """
    template, templated = _LINES, tokenizer.chat_template is not None
    if templated:
        template = tokenizer.get_chat_template(tools=options.get("tools"))
    render = partial(tokenizer.apply_chat_template, tokenize=False, **options)
    marking, has_blocks = _GENERATION.subn(_mark_of_block, template)
    if not has_blocks and any(message.get("tool_calls") for message in answer):
        raise InputError(
            f"{where}: what the assistant says to tools cannot be told from the rest: give the "
            "tokenizer a chat template with {% generation %} blocks"
        )
    header = None
    try:
        whole = str(render([*prompt, *answer], chat_template=template))
        if not has_blocks:
            header = _generation_prompt(prompt + answer, partial(render, chat_template=template))
            prompt = [_with_marks(message, False) for message in prompt]
            answer = [_with_marks(m, m["role"] == "assistant") for m in answer]
        marked = str(render([*prompt, *answer], chat_template=marking))
    except (TemplateError, TypeError) as error:
        raise InputError(f"{where}: the tokenizer's chat template says: {error}") from error
    text, learnt = _read_marks(marked, header)
    if text != whole or (not has_blocks and len(learnt) < marked.count(_END)):
        raise InputError(
            f"{where}: the tokenizer's chat template changes what is said, so answers cannot be "
            "told from the rest: give the tokenizer a template with {% generation %} blocks"
        )
    if has_blocks:
        learnt = learnt[sum(message["role"] == "assistant" for message in prompt) :]
    if not any(text[begin:end].strip() for begin, end in learnt):
        raise InputError(f"{where}: the assistant says nothing, so there is nothing to learn")
    edges = [0, *(edge for span in learnt for edge in span), len(text)]
    return [
        Segment(text[begin:end], bool(number % 2), templated)
        for number, (begin, end) in enumerate(pairwise(edges))
        if begin < end
    ]


def _generation_prompt(messages: list[dict[str, Any]], render: Callable[..., object]) -> str:
    """Return what a chat template writes before an answer, "" if nothing."""
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        return ""
    question = messages[: roles.index("user") + 1]
    closed, asked = (str(render(question, add_generation_prompt=flag)) for flag in (False, True))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(closed, asked, strict=False))
    prompt = asked[sum(1 for _ in same) :]
    return prompt if prompt.strip() else ""


def _mark_of_block(block: re.Match[str]) -> str:
    mark = _END if block["end"] else _BEGIN
    # A block too, because jinja removes the line break after one.
    return f"{{%{block['left']} if true %}}{mark}{{% endif {block['right']}%}}"


def _with_marks(message: dict[str, Any], is_learnt: bool) -> dict[str, Any]:
    """Return a message with marks around what is learnt, or after what is only read. Templates may
    remove spaces and the reasoning, so the marks are within the spaces, and there is one after the
    reasoning.
    """
    text = message.get("content", "")
    if not text.strip():
        return message
    if is_learnt:
        text = _BEFORE_ANSWER.sub(rf"\g<0>{_BEGIN}", text)
    end = len(text.rstrip())
    return {**message, "content": f"{text[:end]}{_END if is_learnt else _READ}{text[end:]}"}


def _read_marks(marked: str, header: str | None) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without its marks, and where each learnt part begins and ends in it. A part
    that has `header` before it begins there, and with the space before if `header` is empty. None:
    the marks are right.
    """
    text, parts, begin, before = "", [], None, 0
    for piece in re.split(f"([{_BEGIN}{_END}{_READ}])", marked):
        if piece == _BEGIN:
            begin = len(text) if begin is None else begin
        elif piece == _END:
            if header is not None and (at := text.find(header, before, begin)) >= 0:
                begin = at + len(header) if header else len(text[:begin].rstrip())
            if begin is not None:
                parts.append((begin, len(text)))
            begin, before = None, len(text)
        elif piece == _READ:
            before = len(text)
        else:
            text += piece
    return text, parts


def encode(segments: Sequence[Segment], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Return `input_ids` and `labels` of one example, with the start token if the tokenizer puts
    one before texts.

    The text is tokenized as a whole. A token is learnt if any of its characters is, and so is the
    special token that ends a learnt segment. If none ends the last one, the end token follows.

    Raises:
        InputError: a part of the text is only read, and the tokenizer does not say where its tokens
        are.
    """
    return next(encode_all([segments], tokenizer))


def encode_all(
    texts: Iterable[Sequence[Segment]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, list[int]]]:
    """Yield what `encode` returns for each. A fast tokenizer reads many at once, on all CPUs."""
    texts = iter(texts)
    while batch := [*islice(texts, TEXTS_AT_A_TIME)]:
        is_whole = all(part.learnt for segments in batch for part in segments)
        if not is_whole and not tokenizer.is_fast:
            raise InputError(
                f"the tokenizer {tokenizer.name_or_path} does not say where its tokens are in the "
                "text, which dialogues need: use a fast tokenizer"
            )
        tokens = tokenizer(
            ["".join(part.text for part in segments) for segments in batch],
            add_special_tokens=False,
            return_offsets_mapping=not is_whole,
        )
        offsets = tokens.get("offset_mapping", tokens["input_ids"])
        for each in zip(batch, tokens["input_ids"], offsets, strict=True):
            yield _example(*each, tokenizer)


def _example(
    segments: Sequence[Segment],
    tokens: list[int],
    offsets: list[tuple[int, int]],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, list[int]]:
    end, start = token_id(tokenizer, "eos"), start_tokens(segments, tokenizer)
    ids, learnt, is_open = start + tokens, [True] * len(tokens), (start + tokens)[-1:] != [end]
    if not all(part.learnt for part in segments):
        learnt, is_open = _learnt(segments, tokens, offsets, tokenizer)
    pairs = zip(tokens, learnt, strict=True)
    labels = [IGNORED] * len(start) + [token if learn else IGNORED for token, learn in pairs]
    if end is not None and is_open:
        ids.append(end)
        labels.append(end)
    return {"input_ids": ids, "labels": labels}


def _learnt(
    segments: Sequence[Segment],
    ids: list[int],
    offsets: list[tuple[int, int]],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[bool], bool]:
    """Return which tokens are learnt, and whether the text ends with a learnt segment that no
    special token ends.
    """
    text, special = "".join(segment.text for segment in segments), _special_ids(tokenizer)
    begins, ends = zip(*offsets, strict=True)
    seen = [number for number, (begin, end) in enumerate(offsets) if text[begin:end].strip()]
    learnt, at, is_open = [False] * len(ids), 0, False
    for segment in segments:
        begin, at = at, at + len(segment.text)
        is_open = is_open and not segment.text.strip()
        if segment.learnt:
            first, last = bisect_right(ends, begin), bisect_left(begins, at)
            inside = bisect_left(seen, last)
            is_open = not (inside and ids[seen[inside - 1]] in special)
            if is_open and inside < len(seen) and ids[seen[inside]] in special:
                last, is_open = seen[inside] + 1, False
            learnt[first:last] = [True] * (last - first)
    return learnt, is_open


@lru_cache(maxsize=4)
def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}


def start_tokens(segments: Sequence[Segment], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the start token in a list, or an empty list if the tokenizer puts none before this
    text.
    """
    start = token_id(tokenizer, "bos")
    if start is None or any(segment.templated for segment in segments):
        return []
    return [start] if _first_id(tokenizer) == start else []


@lru_cache(maxsize=4)
def _first_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return tokenizer("a")["input_ids"][0]


def pack(
    examples: Iterable[Mapping[str, list[int]]], length: int, pad: int
) -> Iterator[dict[str, list[int]]]:
    """Yield blocks of `length` tokens, filled with one example after another. An example is split
    where a block ends.

    `position_ids` start at 0 in each example, so models see where it begins. The first token of an
    example has no label, because nothing comes before it. The last block is padded with `pad`."""
    block = _empty_block()
    for example in examples:
        start, tokens = 0, example["input_ids"]
        while start < len(tokens):
            end = min(len(tokens), start + length - len(block["input_ids"]))
            block["input_ids"] += tokens[start:end]
            block["labels"] += [IGNORED, *example["labels"][start + 1 : end]]
            block["position_ids"] += range(end - start)
            start = end
            if len(block["input_ids"]) == length:
                yield block
                block = _empty_block()
    if block["input_ids"]:
        missing = length - len(block["input_ids"])
        block["input_ids"] += [pad] * missing
        block["labels"] += [IGNORED] * missing
        block["position_ids"] += range(missing)
        yield block


def _empty_block() -> dict[str, list[int]]:
    return {"input_ids": [], "labels": [], "position_ids": []}


def cut(example: Mapping[str, list[int]], length: int) -> dict[str, list[int]]:
    """Return the first `length` tokens of an example."""
    return {name: values[:length] for name, values in example.items()}


# -- encoder-decoder models


def pair_of(record: object, where: str, source: str | None, target: str | None) -> Pair:
    """Return the two texts of a record.

    Columns may have dots: translation.en. InputError if a text is missing.
    """
    if source and target:
        sides = {"--source_column": source, "--target_column": target}
        return Pair(*(text_of(record, where, *side) for side in sides.items()))
    if isinstance(record, Mapping) and (pair := _pair_in(record)):
        return pair
    raise InputError(
        f"{where}: name the texts with --source_column and --target_column (for instance "
        "translation.en)"
    )


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

    def __call__(self, examples: Iterable[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        examples = [*examples]
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
