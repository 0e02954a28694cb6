"""The results of a run: scores, translations, and weights in 16 bits."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import evaluate
import numpy as np
import sacrebleu
import torch
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import EvalPrediction, PreTrainedTokenizerBase

from translation.records import InputError
from translation.tokenizer import pad_token_id

METRIC_SCRIPT = Path(__file__).with_name("bleu_chrf.py")
# sacrebleu's tokenizers, by codes of languages of two and three letters.
_TOKENIZERS = {
    **dict.fromkeys(("zh", "zho"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
}


def bleu_tokenizer(language: str | None) -> str:
    """Return the name of sacrebleu's tokenizer for a language, such as zh, zh_CN or zho_Hans."""
    code = re.split("[_-]", language or "")[0].lower()
    return _TOKENIZERS.get(code, "13a")


def bleu_signature(language: str | None) -> str:
    """Return what sacrebleu says about how BLEU is computed, so that others can reproduce it.

    Raises:
        InputError: a package is missing that tokenizes this language.
    """
    try:
        scorer = sacrebleu.BLEU(tokenize=bleu_tokenizer(language), references=[[""]])
    except RuntimeError as error:
        raise InputError(f"BLEU of {language}: {error}") from error
    return str(scorer.get_signature())


def decode(tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each row of token ids.

    Negative ids (padding of batches and ranks) are left out.
    """
    tokens = np.where(tokens >= 0, tokens, pad_token_id(tokenizer))
    return [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]


def make_compute_metrics(
    tokenizer: PreTrainedTokenizerBase, references: Sequence[str], language: str | None = None
) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return the Trainer's `compute_metrics`: BLEU, chrF, and the mean length of the output in
    tokens.

    `references`: the texts of the data, in its order. Those of the labels are cut and lack the
    characters that the tokenizer does not know. `language`: theirs, which decides how BLEU splits
    them into words.
    """
    tokenize = bleu_tokenizer(language)
    metric = evaluate.load(str(METRIC_SCRIPT), keep_in_memory=True)

    def compute_metrics(result: EvalPrediction) -> dict[str, float]:
        tokens = np.asarray(result.predictions)
        predictions = decode(tokens, tokenizer)
        texts = {"predictions": predictions, "references": references}
        scores = metric.compute(**texts, tokenize=tokenize) or {}
        lengths = np.isin(tokens, [pad_token_id(tokenizer), -100], invert=True).sum(axis=1)
        return {name: round(score, 4) for name, score in scores.items()} | {
            "gen_len": round(float(lengths.mean()), 2)
        }

    return compute_metrics


def print_samples(dataset: Dataset, predictions: list[str], count: int = 12) -> None:
    """Print `count` translations, evenly spread over the split, with sources and references."""
    for index in np.linspace(0, len(predictions) - 1, min(count, len(predictions)), dtype=int):
        record = dataset[int(index)]
        print(
            f"source      {record['source']}\nreference   {record['target']}\nprediction  "
            f"{predictions[index]}\n"
        )


def write_translations(folder: str, translations: list[str]) -> None:
    """Write `generated_predictions.txt`: one translation per line, in the order of the test set."""
    lines = "".join(" ".join(translation.split()) + "\n" for translation in translations)
    Path(folder, "generated_predictions.txt").write_text(lines, encoding="utf-8")


def convert(folder: str | Path, dtype: str) -> None:
    """Convert the saved weights in `folder` to `dtype` ("bfloat16", "float16", "float32").

    One file at a time is in memory. Each file is replaced by one rename, so the folder can be
    loaded at any moment."""
    target = getattr(torch, dtype)
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if all(
            tensor.dtype == target or not tensor.is_floating_point() for tensor in tensors.values()
        ):
            continue
        converted = {n: t.to(target) if t.is_floating_point() else t for n, t in tensors.items()}
        partial = path.with_suffix(".partial")
        save_file(converted, partial, metadata={"format": "pt"})
        partial.replace(path)
    config = Path(folder, "config.json")
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"dtype": dtype}, indent=2, sort_keys=True)
        + "\n"
    )
