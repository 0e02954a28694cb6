"""From raw records to batches: loads each split, takes its first samples, and tokenizes them."""

from collections.abc import Callable
from typing import Any, cast

from datasets import Dataset, Features, Value
from datasets.exceptions import DatasetGenerationError
from transformers import (
    BatchEncoding,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
)

from translation.arguments import uses_built_in_corpus
from translation.options import DataTrainingArguments, ModelArguments
from translation.records import InputError, Records, open_records, read_pairs, required
from translation.tokenizer import pad_token_id

LABEL_PAD = -100


def load_splits(
    data_args: DataTrainingArguments,
    model_args: ModelArguments,
    training_args: Seq2SeqTrainingArguments,
    build_corpus: Callable[[str, str], Any],
) -> dict[str, Dataset]:
    """Load the splits that the stages need, as columns `source` and `target`, with at most
    `--max_*_samples` records. They are files in the memory of the system, not of a process.

    `build_corpus`: makes the three splits of the demonstration's corpus, lists of (source, target)
    by name, from the two languages.

    Raises:
        InputError: a split is missing or empty, or a record does not have both languages.
    """
    stages = {
        "train": (training_args.do_train, data_args.max_train_samples),
        "validation": (training_args.do_eval, data_args.max_eval_samples),
        "test": (training_args.do_predict, data_args.max_predict_samples),
    }
    wanted = {split: limit for split, (enabled, limit) in stages.items() if enabled}
    languages = {
        "source": required(data_args.source_lang, "source_lang"),
        "target": required(data_args.target_lang, "target_lang"),
    }
    with training_args.main_process_first(desc="loading the data"):
        if uses_built_in_corpus(data_args):
            try:
                corpus = build_corpus(*languages.values())
            except ValueError as error:
                raise InputError(str(error)) from error
            pairs = {split: getattr(corpus, split)[:limit] for split, limit in wanted.items()}
            return {
                split: Dataset.from_list([p._asdict() for p in pairs[split]]) for split in wanted
            }
        texts = {}
        for split, limit in wanted.items():
            records = open_records(
                data_args.dataset_name or getattr(data_args, f"{split}_file"),
                "--dataset_name" if data_args.dataset_name else f"--{split}_file",
                split,
                is_any_split=not data_args.dataset_name,
                **model_args.of_datasets(),
            )
            texts[split] = _texts(records, languages, limit, model_args.cache_dir)
        return texts


def _texts(
    records: Records, languages: dict[str, str], limit: int | None, cache_dir: str | None
) -> Dataset:
    """Return the first `limit` records with only the columns `source` and `target`."""
    try:
        texts = Dataset.from_generator(
            read_pairs,
            features=Features(dict.fromkeys(languages, Value("string"))),
            cache_dir=cast(str, cache_dir),  # None, its default, is not of the declared type
            gen_kwargs={"records": records, "languages": languages, "limit": limit},
        )
    except DatasetGenerationError as error:
        raise error.__cause__ if isinstance(error.__cause__, InputError) else error from None
    for column, language in languages.items():
        if not any(text.strip() for text in texts[column]):
            raise InputError(
                f"{records.name}: all texts of {language!r} are empty; give at least one that has "
                "words"
            )
    return texts


def tokenize(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    data_args: DataTrainingArguments,
    training_args: Seq2SeqTrainingArguments,
    split: str,
) -> Dataset:
    """Replace `source` and `target` by `input_ids`, `attention_mask` and `labels` (lists of token
    ids).
    """
    padding = "max_length" if data_args.pad_to_max_length else False
    max_target_length = (
        data_args.max_target_length if split == "train" else data_args.val_max_target_length
    )
    prefix = data_args.source_prefix or ""

    def encode(batch: dict[str, list[str]]) -> BatchEncoding:
        inputs = tokenizer(
            [prefix + text for text in batch["source"]],
            max_length=data_args.max_source_length,
            padding=padding,
            truncation=True,
        )
        labels = tokenizer(
            text_target=batch["target"],
            max_length=max_target_length,
            padding=padding,
            truncation=True,
        )
        inputs["labels"] = labels["input_ids"]
        if padding and data_args.ignore_pad_token_for_loss:
            pad = pad_token_id(tokenizer)
            inputs["labels"] = [
                [LABEL_PAD if token == pad else token for token in row]
                for row in labels["input_ids"]
            ]
        return inputs

    with training_args.main_process_first(desc="tokenizing"):
        return dataset.map(
            encode,
            batched=True,
            num_proc=data_args.preprocessing_num_workers,
            remove_columns=dataset.column_names,
            load_from_cache_file=not data_args.overwrite_cache,
            desc=f"Tokenizing the {split} split",
        )


def make_collator(
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    data_args: DataTrainingArguments,
    training_args: Seq2SeqTrainingArguments,
) -> DataCollatorForSeq2Seq:
    """Make the collator.

    It also adds `decoder_input_ids`, because the Trainer does not pass labels to the model.
    """
    return DataCollatorForSeq2Seq(
        tokenizer,
        model=model,
        padding="longest",
        label_pad_token_id=LABEL_PAD
        if data_args.ignore_pad_token_for_loss
        else pad_token_id(tokenizer),
        pad_to_multiple_of=8 if training_args.fp16 else None,
    )
