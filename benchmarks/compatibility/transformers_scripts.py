"""Scripts in `examples/pytorch` of transformers: their arguments, and tiny models and data for
them.

Nothing is downloaded. The modules in `METRICS` replace the metrics that the scripts take from the
hub. Image scripts need torchvision. `run_summarization` needs nltk and a folder `tokenizers/punkt`
in its data."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_WORDS = (
    "one two three four five six seven eight nine ten apples pears plums boats cars birds".split()
)
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>"]
_TRAIN, _TEST = 48, 8  # samples
_FILES = " --train_file {data}/%s.json --validation_file {data}/%s_test.json"
_IMAGES = " --dataset_name {data}/images --remove_unused_columns false --do_train --do_eval"


def _text(script: str, model: str, data: str, more: str = "") -> tuple[str, str]:
    return (
        f"{script}.py",
        f"--model_name_or_path {{data}}/{model}{_FILES % (data, data)} --do_train --do_eval {more}",
    )


# A path in `examples/pytorch`, and the script's own arguments.
SCRIPTS = {
    "run_clm": _text("language-modeling/run_clm", "llama", "text", "--block_size 32"),
    "run_mlm": _text(
        "language-modeling/run_mlm", "bert", "text", "--max_seq_length 32 --line_by_line"
    ),
    "run_plm": _text("language-modeling/run_plm", "xlnet", "text", "--max_seq_length 32"),
    "run_glue": _text("text-classification/run_glue", "bert", "pairs", "--max_seq_length 32"),
    "run_classification": _text(
        "text-classification/run_classification",
        "bert",
        "sentences",
        "--max_seq_length 32 --text_column_names sentence --shuffle_train_dataset --metric_name "
        "accuracy",
    ),
    "run_ner": _text("token-classification/run_ner", "bert", "tokens", "--max_seq_length 32"),
    "run_swag": _text("multiple-choice/run_swag", "bert", "choices", "--max_seq_length 32"),
    "run_qa": _text(
        "question-answering/run_qa", "bert", "squad", "--max_seq_length 32 --doc_stride 8"
    ),
    "run_seq2seq_qa": _text(
        "question-answering/run_seq2seq_qa",
        "t5",
        "squad",
        "--max_seq_length 32 --max_answer_length 8 --predict_with_generate",
    ),
    "run_summarization": _text(
        "summarization/run_summarization",
        "t5",
        "summaries",
        "--max_source_length 32 --max_target_length 8",
    ),
    "run_translation": _text(
        "translation/run_translation",
        "t5",
        "translations",
        "--max_source_length 32 --max_target_length 8 --source_lang en --target_lang de "
        "--predict_with_generate",
    ),
    "run_image_classification": (
        "image-classification/run_image_classification.py",
        "--model_name_or_path {data}/vit --ignore_mismatched_sizes" + _IMAGES,
    ),
    "run_mim": (
        "image-pretraining/run_mim.py",
        "--model_name_or_path {data}/vit_mim --mask_patch_size 8 --image_size 32 --patch_size 8"
        + _IMAGES,
    ),
}

_METRIC = '''
import datasets
import evaluate


class Metric(evaluate.Metric):
    """Stands for a metric of the hub, whose value is not compared: the number of predictions."""

    def _info(self):
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(
            {"predictions": PREDICTION, "references": REFERENCE}
        ))

    def _compute(self, predictions, references, **_):
        return dict.fromkeys(NAMES, float(len(predictions)))
'''
_INTEGER, _TEXT = 'datasets.Value("int64")', 'datasets.Value("string")'
_TEXTS = f"datasets.Sequence({_TEXT})"
_ANSWERS = f'datasets.Sequence({{"text": {_TEXT}, "answer_start": {_INTEGER}}})'
# For each metric: a prediction, a reference, and the names of its values.
METRICS = {
    "accuracy": (_INTEGER, _INTEGER, ["accuracy"]),
    "glue": (_INTEGER, _INTEGER, ["accuracy", "f1"]),
    "rouge": (_TEXT, _TEXT, ["rouge1"]),
    "sacrebleu": (_TEXT, _TEXTS, ["score"]),
    "seqeval": (
        _TEXTS,
        _TEXTS,
        [f"overall_{name}" for name in ("precision", "recall", "f1", "accuracy")],
    ),
    "squad": (
        f'{{"id": {_TEXT}, "prediction_text": {_TEXT}}}',
        f'{{"id": {_TEXT}, "answers": {_ANSWERS}}}',
        ["exact_match", "f1"],
    ),
}


def _words(chance: random.Random, least: int = 3, most: int = 8) -> str:
    return " ".join(chance.choices(_WORDS, k=chance.randint(least, most)))


def _sample(form: str, chance: random.Random, number: int) -> dict[str, Any]:
    text = _words(chance)
    if form == "pairs":
        return {"sentence1": text, "sentence2": _words(chance), "label": number % 2}
    if form == "sentences":
        return {"sentence": text, "label": number % 3}
    if form == "tokens":
        return {
            "tokens": text.split(),
            "ner_tags": ["B" if len(word) > 4 else "O" for word in text.split()],
        }
    if form == "choices":
        endings = {f"ending{each}": _words(chance) for each in range(4)}
        return {"sent1": text, "sent2": "one", **endings, "label": number % 4}
    if form == "squad":
        answer = chance.choice(text.split())
        answers = {"text": [answer], "answer_start": [text.index(answer)]}
        return {
            "id": str(number),
            "title": "",
            "context": text,
            "question": _words(chance),
            "answers": answers,
        }
    if form == "summaries":
        return {"text": text, "summary": text.split()[0]}
    if form == "translations":
        return {"translation": {"en": text, "de": _words(chance)}}
    return {"text": text}


def _write_texts(folder: Path) -> None:
    for form in (
        "text",
        "pairs",
        "sentences",
        "tokens",
        "choices",
        "squad",
        "summaries",
        "translations",
    ):
        chance = random.Random(form)
        for name, count in ((form, _TRAIN), (f"{form}_test", _TEST)):
            samples = [_sample(form, chance, number) for number in range(count)]
            lines = [{"data": samples}] if form == "squad" else samples
            (folder / f"{name}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _write_images(folder: Path) -> None:
    noise = np.random.default_rng(0)
    for split, count in (("train", _TRAIN), ("validation", _TEST)):
        for number in range(count):
            place = folder / "images" / split / f"kind{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
                place / f"{number}.png"
            )


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate([*_SPECIAL, *_WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", eos_token="</s>", bos_token="[CLS]",
        **names,
    )  # fmt: skip


def _write_models(folder: Path) -> None:
    tokenizer = _tokenizer()
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 5}
    image = {**size, "image_size": 32, "patch_size": 8, "num_channels": 3}
    t5 = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    }
    xlnet = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "llama": ("Llama", "ForCausalLM", {**size, **text, "max_position_embeddings": 128}),
        "bert": ("Bert", "ForMaskedLM", {**size, **text, "max_position_embeddings": 128}),
        "xlnet": ("XLNet", "LMHeadModel", {**xlnet, **text}),
        "t5": ("T5", "ForConditionalGeneration", {**t5, **text}),
        "vit": ("ViT", "ForImageClassification", image),
        "vit_mim": ("ViT", "ForMaskedImageModeling", {**image, "encoder_stride": 8}),
    }
    for seed, (name, (family, head, settings)) in enumerate(kinds.items()):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(**settings)
        getattr(transformers, family + head)(config).save_pretrained(folder / name)
        reader = (
            tokenizer
            if family != "ViT"
            else transformers.ViTImageProcessor(size={"height": 32, "width": 32})
        )
        reader.save_pretrained(folder / name)


def write_transformers_inputs(folder: Path) -> None:
    """Write models, data and metrics. Scripts that use metrics must run in `folder`."""
    _write_texts(folder)
    _write_images(folder)
    _write_models(folder)
    for name, (prediction, reference, values) in METRICS.items():
        (folder / name).mkdir(exist_ok=True)
        source = (
            _METRIC.replace("PREDICTION", prediction)
            .replace("REFERENCE", reference)
            .replace("NAMES", repr(values))
        )
        (folder / name / f"{name}.py").write_text(source.replace("NAMES", repr(values)))
