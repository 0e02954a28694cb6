"""What is learnt of a dialogue, under chat templates as models of today have them.

TRL has most of them. `templates/` has one file for each of the others: it writes turns as the
model's own template does, without tools, dates and pictures.
"""
# ruff: noqa: RUF001 - DeepSeek's special tokens have another vertical line

from __future__ import annotations

import copy
import importlib.util
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from distill.batch import IGNORED
from distill.corpus import train_tokenizer
from distill.data import encode, segments_of
from translation.records import InputError

FOLDER = Path(__file__).with_name("templates")
SPECIAL = re.compile(r"<\|\w+\|>|<\w+_of_turn>|\[/?[A-Z_]{3,}\]|<｜[^｜]+｜>|<\|?turn\|?>")
# What comes before an answer and is only read, what is learnt of the answer {}, and what is learnt
# of the last answer if that is something else. <|end|> is the tokenizer's own end token.
LEARNT = {
    "chatml": ("<|im_start|>assistant\n", "{}<|im_end|>"),
    "deepseek_r1": ("<｜Assistant｜>", "{}<｜end▁of▁sentence｜>"),
    "gpt_oss": (
        "<|start|>assistant",
        "<|channel|>final<|message|>{}<|end|>",
        "<|channel|>final<|message|>{}<|return|>",
    ),
    "granite3": ("assistant<|end_of_role|>", "{}<|end_of_text|>"),
    "llama2": ("[/INST]", " {} <|end|>"),
    "mistral_v3": ("[/INST]", " {}<|end|>"),
    "mistral_v7": ("[/INST]", "{}<|end|>"),
    "phi4": ("assistant<|im_sep|>", "{}<|im_end|>"),
    # Only the last answer keeps its reasoning, which may be empty.
    "qwen3": ("<|im_start|>assistant\n", "{}<|im_end|>", "<think>\n\n</think>\n\n{}<|im_end|>"),
    # Its own {% generation %} blocks begin before the header.
    "smollm3": ("<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n"),
    "vicuna": ("ASSISTANT:", " {}<|end|>"),
    "zephyr": ("<|assistant|>\n", "{}<|end|>"),
}
# Answers that are also in headers and questions, where they are not learnt.
ANSWERS = ["a", "user"]
TURNS = ["user", ANSWERS[0], "is it a model?", ANSWERS[1]]
NO_SYSTEM = ("mistral_v3",)
BASE = train_tokenizer(["def add(a, b):\n    return a + b\n"] * 5, 300)


def templated(template: str):
    """Return a tokenizer of bytes with this chat template, whose special tokens are those in it."""
    tokenizer = copy.deepcopy(BASE)
    tokenizer.bos_token = "<|begin|>"
    names = {*SPECIAL.findall(template), "<|user|>", "<|assistant|>", "<|CHATBOT_TOKEN|>"}
    tokens = [AddedToken(name, normalized=False, special=True) for name in sorted(names)]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = template
    return tokenizer


def dialogue(turns: list[str]) -> list[dict[str, str]]:
    roles = ("user", "assistant") * 2
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


def of_file(name: str):
    return templated((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))


def marked(example, tokenizer) -> str:
    """Return the text of an example, with its learnt parts in «»."""
    text, was = "", False
    for token, label in zip(example["input_ids"], example["labels"], strict=True):
        assert label in (token, IGNORED)
        if was != (label != IGNORED):
            text += "»" if was else "«"
            was = not was
        text += tokenizer.convert_ids_to_tokens([token])[0]
    return text.replace("Ġ", " ").replace("Ċ", "\n") + ("»" if was else "")


@pytest.mark.parametrize("name", sorted(LEARNT))
def test_answers_and_their_ends_are_learnt(name):
    tokenizer = of_file(name)
    header, learnt, *last = LEARNT[name]
    prompts = [[]] if name in NO_SYSTEM else [[], [{"role": "system", "content": "a user"}]]
    for prompt in prompts:
        messages = prompt + dialogue(TURNS)
        example = encode(segments_of({"messages": messages}, "here", tokenizer), tokenizer)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert example["input_ids"] == whole
        found = marked(example, tokenizer)
        assert found.count("«") == 2
        for form, answer in zip([learnt, *(last or [learnt])], ANSWERS, strict=True):
            assert f"{header}«{form.format(answer)}»" in found


def test_every_template_is_in_the_table():
    assert {path.stem for path in FOLDER.glob("*.jinja")} == LEARNT.keys()


THOUGHTS = [f"<think>\nr{number}\n</think>\n\na{number}" for number in (1, 2)]
REASONED = dialogue(["q", THOUGHTS[0], "q2", THOUGHTS[1]])
OF_ITS_OWN_KEY = [*dialogue(["q"]), {"role": "assistant", "content": "a", "thinking": "r"}]
ANALYSIS = "<|channel|>analysis<|message|>r<|end|><|start|>assistant<|channel|>final<|message|>a"


@pytest.mark.parametrize(
    ("name", "messages", "learnt"),
    [
        ("chatml", REASONED, [f"{thought}<|im_end|>" for thought in THOUGHTS]),
        ("deepseek_r1", REASONED, ["a1<｜end▁of▁sentence｜>", "a2<｜end▁of▁sentence｜>"]),
        ("qwen3", REASONED, ["a1<|im_end|>", "<think>\nr2\n</think>\n\na2<|im_end|>"]),
        ("gpt_oss", OF_ITS_OWN_KEY, [f"{ANALYSIS}<|return|>"]),
    ],
)
def test_reasoning_is_learnt_where_the_template_keeps_it(name, messages, learnt):
    tokenizer = of_file(name)
    example = encode(segments_of(messages, "here", tokenizer), tokenizer)
    assert re.findall("«(.*?)»", marked(example, tokenizer), re.DOTALL) == learnt


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ADD = {"name": "add", "description": "", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": ADD}]
USES_TOOLS = (
    "{{ tools | tojson }}{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content or message.tool_calls[0].function.name }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}\n{% endfor %}{{ note }}"
)


def test_calls_of_tools_are_learnt_where_the_template_marks_them():
    record = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "two", "tool_calls": None},
        ],
        "tools": TOOLS,
        "chat_template_kwargs": {"note": "N"},
    }
    tokenizer = templated(USES_TOOLS)
    text = marked(encode(segments_of(record, "here", tokenizer), tokenizer), tokenizer)
    assert '"name": "add"' in text and text.endswith("N")
    assert re.findall("«(.*?)»", text) == ["add<|im_end|>", "two<|im_end|>"]
    with pytest.raises(InputError, match="^here.*generation"):
        segments_of(record, "here", of_file("chatml"))


@pytest.mark.parametrize("name", ["chatml", "smollm3"])
def test_only_the_completion_is_learnt(name):
    messages = dialogue(["q1", "a1", "q2", "a2"])
    record = {"prompt": messages[:3], "completion": messages[3:], "system": "be brief"}
    tokenizer = of_file(name)
    text = marked(encode(segments_of(record, "here", tokenizer), tokenizer), tokenizer)
    assert "be brief<|im_end|>" in text and text.count("«") == 1
    assert "a2<|im_end|>" in text.split("«")[1]


def test_a_dialogue_that_ends_with_a_question_has_no_end_token():
    tokenizer = of_file("chatml")
    found = encode(segments_of(["q", "a", "q2"], "here", tokenizer), tokenizer)
    assert found["input_ids"][-1] != tokenizer.eos_token_id


def test_a_template_that_changes_what_is_said_is_refused():
    tokenizer = templated("{% for message in messages %}{{ message.content | upper }}{% endfor %}")
    assert encode(segments_of(["q", "a"], "here", tokenizer), tokenizer)["labels"][-2:] == [
        tokenizer("A", add_special_tokens=False)["input_ids"][0],
        tokenizer.eos_token_id,
    ]
    tokenizer.chat_template = "{% for message in messages %}{{ message.content[:2] }}{% endfor %}"
    with pytest.raises(InputError, match="^here.*changes what is said"):
        segments_of(["question", "answer"], "here", tokenizer)


def test_the_space_that_a_tokenizer_puts_before_a_text_is_put_before_the_whole():
    """As Llama 2's and Mistral's do."""
    pieces = ["<unk>", "<s>", "</s>", "\u2581", *"[]/INST", *"adehilortx"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    backend.normalizer = normalizers.Sequence(spaces)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = (FOLDER / "llama2.jinja").read_text(encoding="utf-8")
    example = encode(segments_of(["hi", "hello"], "here", tokenizer), tokenizer)
    text = tokenizer.apply_chat_template(dialogue(["hi", "hello"]), tokenize=False)
    assert example["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    learnt = [label for label in example["labels"] if label != IGNORED]
    assert "".join(tokenizer.convert_ids_to_tokens(learnt)) == "\u2581hello\u2581</s>"


# -- TRL's templates, whose names end in _training where {% generation %} marks what is learnt

_TRL = importlib.util.find_spec("trl")
_TRAINING = sorted(Path(_TRL.origin).parent.glob("chat_templates/*_training.jinja")) if _TRL else []
# Those that take lists of texts and pictures only.
_PICTURES = ("idefics3", "llava_next", "smolvlm")
TRAINING = {path.stem.removesuffix("_training"): path for path in _TRAINING}
TRAINING = {name: path for name, path in TRAINING.items() if name not in _PICTURES}
EACH = pytest.mark.parametrize("name", sorted(TRAINING))


@EACH
def test_what_a_template_marks_is_learnt_as_trl_learns_it(name):
    tokenizer = templated(TRAINING[name].read_text(encoding="utf-8"))
    expected = tokenizer.apply_chat_template(
        dialogue(TURNS), return_dict=True, return_assistant_tokens_mask=True
    )
    example = encode(segments_of(dialogue(TURNS), "here", tokenizer), tokenizer)
    length = len(expected["input_ids"])
    assert example["input_ids"][:length] == expected["input_ids"]
    learnt = [int(label != IGNORED) for label in example["labels"]]
    assert learnt[:length] == expected["assistant_masks"]


@EACH
def test_a_template_without_marks_teaches_what_trl_marks_in_it(name):
    """Up to the header and the line break after the end, which a model does not write, and the
    empty reasoning that TRL adds to the template.
    """
    path = TRAINING[name].with_name(f"{name}.jinja")
    found = []
    for each in (path, TRAINING[name]):
        tokenizer = templated(each.read_text(encoding="utf-8"))
        text = marked(encode(segments_of(dialogue(TURNS), "here", tokenizer), tokenizer), tokenizer)
        found.append(re.findall("«(.*?)»", text, re.DOTALL))
    ours, theirs = found
    if name == "glm4moe":  # TRL writes one more header after the last answer
        theirs[-1] = theirs[-1].replace("<|user|>", tokenizer.eos_token)
    assert len(ours) == len(theirs) == 2
    for learnt, marks in zip(ours, theirs, strict=True):
        assert learnt.rstrip() in marks
