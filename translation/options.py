"""The arguments of run_translation.py on top of the Trainer's. This imports neither torch nor
transformers, so that `--help` is quick.
"""

from dataclasses import dataclass
from typing import Any

from translation.command_line import Application, option

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass
class LoadingArguments:
    """From where, and how, a model, its tokenizer and data are loaded: in both applications."""

    model_name_or_path: str | None = option(
        None, "Model folder or hub name. Default: a small T5 is trained from scratch."
    )
    model_revision: str = option("main", "Branch, tag or commit of the hub model.")
    trust_remote_code: bool = option(False, "Allow code from the hub model to run here.")
    attn_implementation: str | None = option(None, "sdpa, flash_attention_2 or eager.")
    dtype: str | None = option(
        None, "Default: the file's (auto), float32 without an engine.", choices=DTYPES
    )
    token: str | None = option(None, "Access token for the hub.")
    cache_dir: str | None = option(None, "Folder for downloads and prepared data.")
    dataset_config_name: str | None = option(None, "Configuration of a `datasets` dataset.")
    dataset_revision: str | None = option(None, "Branch, tag or commit of a hub dataset.")

    def of_hub(self) -> dict[str, Any]:
        """The options with which transformers finds the model's files."""
        given = {"cache_dir": self.cache_dir, "token": self.token}
        given |= {"revision": self.model_revision}
        return {**given, "trust_remote_code": self.trust_remote_code}

    def of_datasets(self) -> dict[str, Any]:
        """The options of `open_records` for a dataset of the hub."""
        given = {"cache_dir": self.cache_dir, "token": self.token}
        return {**given, "config": self.dataset_config_name, "revision": self.dataset_revision}


@dataclass
class ModelArguments(LoadingArguments):
    """Which model, configuration and tokenizer to use."""

    config_name: str | None = option(None, "Configuration; alone: to train from scratch.")
    tokenizer_name: str | None = option(None, "Tokenizer folder or hub name. Default: the model's.")


@dataclass
class DataTrainingArguments:
    """Languages, data files, lengths and numbers of samples."""

    source_lang: str | None = option(None, "Language to translate from: a key of each record.")
    target_lang: str | None = option(None, "Language to translate to: a key of each record.")
    dataset_name: str | None = option(None, "A `datasets` dataset, or folder of save_to_disk.")
    train_file: str | None = option(None, "JSON (lines), CSV, TSV, Parquet, or a dataset.")
    validation_file: str | None = option(None, "Validation data, in the same formats.")
    test_file: str | None = option(None, "Test data, in the same formats.")
    overwrite_cache: bool = option(False, "Prepare the data again instead of using the cache.")
    preprocessing_num_workers: int | None = option(None, "Processes that tokenize. Default: one.")
    max_source_length: int = option(128, "Longer sources are truncated to this many tokens.")
    max_target_length: int = option(128, "Longer targets are truncated to this many tokens.")
    val_max_target_length: int | None = option(None, "The same to evaluate and generate.")
    pad_to_max_length: bool = option(False, "Pad to the maximum, not to the batch's longest.")
    max_train_samples: int | None = option(None, "Use only this many training pairs.")
    max_eval_samples: int | None = option(None, "Use only this many validation pairs.")
    max_predict_samples: int | None = option(None, "Use only this many test pairs.")
    num_beams: int | None = option(None, "Beams in evaluation and prediction.")
    ignore_pad_token_for_loss: bool = option(True, "Leave padding out of the loss.")
    source_prefix: str | None = option(None, "Text to put before every source sentence.")
    forced_bos_token: str | None = option(None, "First token to generate: the language.")
    overwrite_output_dir: bool = option(False, "Train anew into a folder with files.")


APPLICATION = Application(
    script="run_translation.py",
    summary="Train, evaluate and use a translation model. Without a model and data this is\n"
    "a demonstration that needs no network. More in docs/translation.md.",
    example="  torchrun --nproc_per_node 2 run_translation.py \\\n"
    "      --deepspeed configs/zero3.json --model_name_or_path path/to/t5 \\\n"
    "      --source_lang en --target_lang de --train_file train.jsonl \\\n"
    "      --do_train --output_dir output/t5-en-de",
    extra="translation",
    packages=("babel", "datasets", "evaluate", "sacrebleu", "sentencepiece"),
    groups={"model": ModelArguments, "data and generation": DataTrainingArguments},
)
