"""What a run leaves behind for people: scores, translations, and proof that the checkpoint loads."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import evaluate
import numpy as np
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import EvalPrediction, PreTrainedTokenizerBase

METRIC_SCRIPT = Path(__file__).parents[1] / "metrics" / "bleu_chrf.py"
# Set by torchrun. A process started from a rank must not take itself for that rank.
LAUNCHER_VARIABLES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT".split()


def decode(tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Text of each row of token ids; negative ids (padding between batches and ranks) are left out."""
    tokens = np.where(tokens >= 0, tokens, tokenizer.pad_token_id)
    return [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]


def make_compute_metrics(tokenizer: PreTrainedTokenizerBase) -> Callable[[EvalPrediction], dict[str, float]]:
    """The Trainer's `compute_metrics`: BLEU, chrF and the mean length of what was generated, in tokens."""
    metric = evaluate.load(str(METRIC_SCRIPT), keep_in_memory=True)

    def compute_metrics(result: EvalPrediction) -> dict[str, float]:
        predictions, references = decode(result.predictions, tokenizer), decode(result.label_ids, tokenizer)
        scores = metric.compute(predictions=predictions, references=references)
        lengths = np.isin(result.predictions, [tokenizer.pad_token_id, -100], invert=True).sum(axis=1)
        return {name: round(score, 4) for name, score in scores.items()} | {"gen_len": round(float(lengths.mean()), 2)}

    return compute_metrics


def print_samples(dataset: Dataset, predictions: list[str], count: int = 12) -> None:
    """Print `count` translations, evenly spread over the set, with their sources and references."""
    for index in np.linspace(0, len(predictions) - 1, min(count, len(predictions)), dtype=int):
        record = dataset[int(index)]
        print(f"source      {record['source']}\nreference   {record['target']}\nprediction  {predictions[index]}\n")


def write_translations(folder: str, translations: list[str]) -> None:
    """Write `generated_predictions.txt`: one translation a line, in the order of the test split."""
    lines = "".join(" ".join(translation.split()) + "\n" for translation in translations)
    Path(folder, "generated_predictions.txt").write_text(lines, encoding="utf-8")


def store_in_16_bit(folder: str) -> None:
    """Rewrite the weights that `save_model` left in `folder` as bfloat16, unless they are 16-bit already.

    A crash at any moment leaves weights that load: `from_pretrained` casts them to the `dtype` in config.json.
    """
    weights, config = Path(folder, "model.safetensors"), Path(folder, "config.json")
    tensors = load_file(weights)
    if all(tensor.element_size() == 2 for tensor in tensors.values()):
        return
    partial = weights.with_suffix(".partial")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"})
    partial.replace(weights)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}, indent=2, sort_keys=True))


def reload_in_fresh_process(folder: str, sentences: list[str]) -> None:
    """Translate sentences with the checkpoint in `folder`, in a new process that knows transformers and nothing of us.

    Raises:
        subprocess.CalledProcessError: the checkpoint does not load.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    command = [sys.executable, "-m", "translation.reload", os.path.abspath(folder), *sentences]
    sys.stdout.flush()
    subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], check=True)
