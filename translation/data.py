"""From raw records to batches: loads each split, takes its first samples, and tokenizes them."""

import datasets
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetGenerationError
from transformers import (
    BatchEncoding,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
)

from translation.arguments import uses_built_in_corpus
from translation.corpus import build_corpus
from translation.options import DataTrainingArguments, ModelArguments
from translation.records import (
    FORMATS,
    InputError,
    check_data_file,
    check_record,
    column_names,
    delimiter,
    language_key,
    required,
)
from translation.tokenizer import pad_token_id

LABEL_PAD = -100


def load_splits(
    data_args: DataTrainingArguments,
    model_args: ModelArguments,
    training_args: Seq2SeqTrainingArguments,
) -> dict[str, Dataset]:
    """Load the splits that the stages need, as columns `source` and `target`, with at most
    `--max_*_samples` records.

    Raises:
        InputError: a split is missing or empty, or a record does not have both languages.
    """
    stages = {
        "train": (training_args.do_train, data_args.max_train_samples),
        "validation": (training_args.do_eval, data_args.max_eval_samples),
        "test": (training_args.do_predict, data_args.max_predict_samples),
    }
    wanted = {split: limit for split, (enabled, limit) in stages.items() if enabled}
    with training_args.main_process_first(desc="loading the data"):
        if uses_built_in_corpus(data_args):
            raw = _built_in_corpus(data_args)
        elif data_args.dataset_name:
            raw = _load_named(data_args, model_args)
        else:
            raw = {split: _load_file(data_args, split, model_args.cache_dir) for split in wanted}
        return {
            split: _source_and_target(raw, split, limit, data_args)
            for split, limit in wanted.items()
        }


def _built_in_corpus(data_args: DataTrainingArguments) -> dict[str, Dataset]:
    source = required(data_args.source_lang, "source_lang")
    target = required(data_args.target_lang, "target_lang")
    try:
        corpus = build_corpus(source, target)
    except ValueError as error:
        raise InputError(str(error)) from error
    return {
        split: Dataset.from_dict(
            {source: [pair.source for pair in pairs], target: [pair.target for pair in pairs]}
        )
        for split, pairs in corpus._asdict().items()
    }


def _load_file(data_args: DataTrainingArguments, split: str, cache_dir: str | None) -> Dataset:
    argument = f"{split}_file"
    path = getattr(data_args, argument)
    kind = FORMATS[path[path.rindex(".") :].lower()]
    options = {}
    if kind == "csv":
        # Everything is text: "42" is not a number, and the sentence "NA" is not a missing value.
        features = datasets.Features(
            {column: datasets.Value("string") for column in column_names(path)}
        )
        options = {"sep": delimiter(path), "features": features, "keep_default_na": False}
    mode = "force_redownload" if data_args.overwrite_cache else None
    try:
        return datasets.load_dataset(
            kind, data_files=path, split="train", cache_dir=cache_dir, download_mode=mode, **options
        )
    except DatasetGenerationError as error:
        # The library does not name the line. This check of all lines does.
        check_data_file(path, f"--{argument}", _languages(data_args), limit=None)
        raise InputError(f"--{argument} {path}: {error.__cause__ or error}") from error


def _load_named(data_args: DataTrainingArguments, model_args: ModelArguments) -> dict[str, Dataset]:
    name = required(data_args.dataset_name, "dataset_name")
    try:
        saved = datasets.load_from_disk(name)
        return {"train": saved} if isinstance(saved, Dataset) else _by_name(saved)
    except FileNotFoundError:
        pass  # not a folder of save_to_disk: the name of a dataset, or a folder of files
    try:
        return _by_name(
            datasets.load_dataset(
                name,
                data_args.dataset_config_name,
                cache_dir=model_args.cache_dir,
                token=model_args.token,
            )
        )
    except (OSError, ValueError) as error:
        raise InputError(f"--dataset_name {name}: {error}") from error


def _by_name(splits: DatasetDict) -> dict[str, Dataset]:
    return {str(name): split for name, split in splits.items()}


def _languages(data_args: DataTrainingArguments) -> dict[str, str | None]:
    return {"--source_lang": data_args.source_lang, "--target_lang": data_args.target_lang}


def _source_and_target(
    raw: dict[str, Dataset], split: str, limit: int | None, data_args: DataTrainingArguments
) -> Dataset:
    """Return the first `limit` records of one split, with only the columns `source` and
    `target`.
    """
    if split not in raw:
        raise InputError(
            f"--dataset_name {data_args.dataset_name} has no split {split!r}, only {', '.join(raw)}"
        )
    records = raw[split]
    if limit is not None:
        records = records.select(range(min(limit, len(records))))
    if not len(records):
        raise InputError(f"the {split} split is empty; give at least one pair of sentences")
    check_record(records[0], f"the {split} split", _languages(data_args))
    source = required(data_args.source_lang, "source_lang")
    target = required(data_args.target_lang, "target_lang")

    def pick(record: dict, index: int) -> dict[str, str]:
        texts = record.get("translation", record)
        check_record(record, f"the {split} split, record {index + 1}", _languages(data_args))
        return {
            "source": texts[language_key(source, texts)],
            "target": texts[language_key(target, texts)],
        }

    texts = records.map(
        pick,
        with_indices=True,
        remove_columns=records.column_names,
        load_from_cache_file=not data_args.overwrite_cache,
        desc=f"Reading the {split} split",
    )
    for column, language in (("source", source), ("target", target)):
        if not any(text.strip() for text in texts[column]):
            raise InputError(
                f"the {split} split: all texts of {language!r} are empty; give at least one that "
                "has words"
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
