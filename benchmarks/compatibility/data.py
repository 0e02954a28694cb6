"""A tiny model with a trained tokenizer, and tiny data sets in the formats of training scripts.

Nothing is downloaded. Everything is the same on every machine.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = (
    "one two three four five six seven eight nine ten apples pears plums boats cars birds".split()
)
TRAIN, TEST = 32, 8  # samples


def _question(chance: random.Random) -> list[dict[str, str]]:
    return [
        {
            "role": "user",
            "content": "Say " + " ".join(chance.choices(_WORDS, k=chance.randint(2, 6))),
        }
    ]


def _answer(chance: random.Random) -> list[dict[str, str]]:
    return [
        {"role": "assistant", "content": " ".join(chance.choices(_WORDS, k=chance.randint(2, 8)))}
    ]


def _sample(form: str, chance: random.Random) -> dict[str, Any]:
    question = _question(chance)
    if form == "messages":
        return {"messages": question + _answer(chance)}
    if form == "preference":
        return {"prompt": question, "chosen": _answer(chance), "rejected": _answer(chance)}
    if form == "label":
        return {"prompt": question, "completion": _answer(chance), "label": chance.random() < 0.5}
    return {"prompt": question}


def write_datasets(folder: Path) -> None:
    """Write a folder for each format of `_sample`, with `train.jsonl` and `test.jsonl`, for
    `load_dataset(folder)`.
    """
    for form in ("messages", "preference", "label", "prompt"):
        (folder / form).mkdir(parents=True, exist_ok=True)
        chance = random.Random(form)
        for split, count in (("train", TRAIN), ("test", TEST)):
            lines = [json.dumps(_sample(form, chance)) + "\n" for _ in range(count)]
            (folder / form / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the words of the data sets. It has a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(["user", "assistant", "Say", *_WORDS])] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_models(folder: Path) -> None:
    """Write `model` and `teacher` (causal) and `reward` (a score for a sequence): fp32 Qwen2 with
    the tokenizer.
    """
    tokenizer = make_tokenizer()
    for seed, name in enumerate(("model", "teacher", "reward")):
        torch.manual_seed(seed)
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_key_value_heads=2,
            num_attention_heads=4, max_position_embeddings=256, tie_word_embeddings=name == "model",
            num_labels=1,
            initializer_range=0.2, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        kind = Qwen2ForSequenceClassification if name == "reward" else Qwen2ForCausalLM
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def vowels(completions: list[Any], **_: Any) -> list[float]:
    """A reward: the number of vowels in a completion."""
    texts = [completion[-1]["content"] for completion in completions]
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in texts]
