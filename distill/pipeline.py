"""run_distill.py with named models and data: load, train, score, export; and write a teacher
cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from distill import cache, data, export
from distill.alignment import encode_twice
from distill.arguments import Arguments, DataArguments, ModelArguments
from distill.batch import Batch
from distill.config import DistillationConfig
from distill.student import copy_layers, cut_config, from_config, load_config, parse_layers
from distill.teacher import load_model
from distill.trainer import DistillationTrainer
from translation import report
from translation.records import InputError
from translation.tokenizer import pad_token_id

logger = logging.getLogger(__name__)

Examples = list[dict[str, list[int]]]


def run(arguments: Arguments) -> None:
    """Train, evaluate and predict. Write the student, its card and the figures to
    `args.output_dir`.

    Raises:
        InputError: models, tokenizers or data cannot be loaded, or do not go together.
    """
    model_args, data_args, args = arguments
    tokenizer, teacher_tokenizer = load_tokenizers(model_args, args)
    teacher = _load_teacher(model_args, args)
    if teacher is not None:
        _check_vocabulary("teacher_model_name_or_path", teacher, len(teacher_tokenizer))
    student = load_student(model_args, teacher, len(tokenizer))
    splits = _load_splits(
        data_args, args, tokenizer, teacher_tokenizer, student.config.is_encoder_decoder
    )
    if not args.needs_teacher():
        teacher = None  # it was needed only to make the student
    try:
        trainer = DistillationTrainer(
            student,
            teacher,
            args,
            train_dataset=splits.get("train"),
            eval_dataset=splits.get("validation"),
            processing_class=tokenizer,
            teacher_processing_class=teacher_tokenizer,
            data_collator=data.Collator(pad_token_id(tokenizer)),
            compute_metrics=report.make_compute_metrics(tokenizer)
            if args.predict_with_generate
            else None,
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    figures = {}
    if args.do_eval:
        figures = trainer.evaluate()
        trainer.log_metrics("eval", figures)
        trainer.save_metrics("eval", figures)
    if args.do_predict:
        figures |= _predict(trainer, splits["test"])
    if args.do_train and args.process_index == 0:
        report.convert(args.output_dir, data_args.export_dtype)
        source = args.teacher_model_name_or_path or args.teacher_cache or "no teacher"
        export.write_card(args.output_dir, args, source, figures, data_args.train_file)
        logger.info("student: %s (%s)", args.output_dir, data_args.export_dtype)


def _predict(trainer: DistillationTrainer, tokens: Examples) -> dict[str, float]:
    """Score the test split. With generation, write the generated texts, one in each line."""
    result = trainer.predict(tokens, metric_key_prefix="predict")
    trainer.log_metrics("predict", result.metrics)
    trainer.save_metrics("predict", result.metrics)
    if trainer.args.predict_with_generate and trainer.is_world_process_zero():
        report.write_translations(
            trainer.args.output_dir, report.decode(result.predictions, trainer.processing_class)
        )
    return result.metrics


# -- models and tokenizers


def load_tokenizers(
    model_args: ModelArguments, args: DistillationConfig
) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase | None]:
    """Return the tokenizers of student and teacher;

    None for the teacher if no teacher model is named.
    """
    names = [
        model_args.tokenizer_name,
        model_args.model_name_or_path,
        args.teacher_model_name_or_path,
    ]
    name = next((name for name in names if name), None)
    if name is None:
        raise InputError(
            "there is no tokenizer: give --tokenizer_name, with the tokenizer of the teacher cache"
        )
    tokenizer = _load_tokenizer(name)
    if args.teacher_model_name_or_path is None:
        return tokenizer, None
    return tokenizer, _load_tokenizer(args.teacher_model_name_or_path)


def _load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(f"no tokenizer could be loaded from {name} ({error})") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_teacher(model_args: ModelArguments, args: DistillationConfig) -> PreTrainedModel | None:
    needed = model_args.init_student_from_teacher or (
        args.needs_teacher() and not args.teacher_cache
    )
    if not needed:
        return None
    try:
        return load_model(args.teacher_model_name_or_path)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(
            f"--teacher_model_name_or_path {args.teacher_model_name_or_path}: {error}"
        ) from error


def _check_vocabulary(argument: str, model: PreTrainedModel, tokens: int) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < tokens:
        raise InputError(
            f"--{argument}: the model has embeddings for {rows} tokens and its tokenizer has "
            f"{tokens}: the two do not"
            " belong together; name the model's own tokenizer"
        )


def load_student(
    model_args: ModelArguments, teacher: PreTrainedModel | None, tokens: int
) -> PreTrainedModel:
    """Return the student: a named model, a new one from a configuration, or some layers of the
    teacher.
    """
    if model_args.model_name_or_path:
        try:
            student = load_model(model_args.model_name_or_path)
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(
                f"--model_name_or_path {model_args.model_name_or_path}: {error}"
            ) from error
        _check_vocabulary("model_name_or_path", student, tokens)
        return student
    layers = None
    if model_args.init_student_from_teacher:
        layers = parse_layers(
            model_args.init_student_from_teacher, teacher.config.num_hidden_layers
        )
    config = (
        load_config(model_args.student_config)
        if model_args.student_config
        else cut_config(teacher.config, layers)
    )
    if config.get_text_config().vocab_size < tokens:
        raise InputError(
            f"the student's vocab_size is {config.get_text_config().vocab_size} and its tokenizer "
            f"has {tokens} tokens:"
            f" set vocab_size in --student_config to at least that"
        )
    student = from_config(config)
    if layers is not None:
        copy_layers(student, teacher, layers)
    return student


# -- data


def _load_splits(data_args, args, tokenizer, teacher_tokenizer, pairs: bool) -> dict[str, Examples]:
    wanted = {"train": args.do_train, "validation": args.do_eval, "test": args.do_predict}
    uld = args.loss_type == "uld" and teacher_tokenizer is not None
    if uld and pairs:
        raise InputError(
            "loss_type uld works for causal models only: use a student with the teacher's tokenizer"
        )
    other = teacher_tokenizer if uld else None
    first, written = args.process_index == 0, bool(args.lmbda or args.seq_kd)
    splits = {}
    for split, enabled in wanted.items():
        if enabled:
            name = getattr(data_args, f"{split}_file")
            splits[split] = load_examples(
                name, split, data_args, tokenizer, other, pairs, first, written
            )
    if data_args.max_train_tokens and "train" in splits:
        splits["train"] = _first_tokens(splits["train"], data_args.max_train_tokens)
    if data_args.max_eval_samples and "validation" in splits:
        splits["validation"] = splits["validation"][: data_args.max_eval_samples]
    return splits


def _first_tokens(examples: Examples, tokens: int) -> Examples:
    kept: Examples = []
    for example in examples:
        if tokens <= 0:
            break
        kept.append(example)
        tokens -= len(example["input_ids"])
    return kept


def load_examples(
    name: str,
    split: str,
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase | None,
    pairs: bool,
    show_progress: bool = True,
    written: bool = False,
) -> Examples:
    """Return the token ids of a split: packed blocks, single examples, or pairs.

    `teacher_tokenizer`: also encode by this one. `written`: models will generate answers, so
    examples are not packed."""
    argument = f"--{split}_file {name}"
    records = tqdm(
        data.read_records(name, split), desc=f"reading the {split} split", disable=not show_progress
    )
    length = data_args.max_length
    packing = data_args.packing and not written
    if pairs:
        columns = data_args.source_column, data_args.target_column
        texts = (data.pair_of(record, where, *columns) for where, record in records)
        texts = _with_words(texts, lambda pair: pair.target, argument)
        examples = [data.encode_pair(pair, tokenizer, length) for pair in texts]
    else:
        texts = (data.segments_of(record, where, tokenizer) for where, record in records)
        texts = _with_words(
            texts, lambda segments: "".join(part.text for part in segments if part.learnt), argument
        )
        if teacher_tokenizer is not None:
            examples = [encode_twice(text, tokenizer, teacher_tokenizer, length) for text in texts]
        elif packing:
            examples = data.pack(
                (data.encode(t, tokenizer) for t in texts), length, pad_token_id(tokenizer)
            )
        else:
            examples = [data.cut(data.encode(text, tokenizer), length) for text in texts]
    return examples


def _with_words(examples: Iterable, learnt: Callable[[Any], str], argument: str) -> Iterator:
    """Yield the examples. Raise InputError at the end if none of them has any text to learn."""
    empty = True
    for example in examples:
        empty = empty and not learnt(example).strip()
        yield example
    if empty:
        raise InputError(f"{argument}: there is nothing in it")


# -- the teacher cache


def cache_teacher(arguments: Arguments) -> None:
    """Write the teacher's probabilities for the training data to `--teacher_cache`.

    Raises:
        InputError: as `run`; also if the folder holds another cache.
    """
    model_args, data_args, args = arguments
    tokenizer, _ = load_tokenizers(model_args, args)
    teacher = load_model(args.teacher_model_name_or_path)
    seq2seq = teacher.config.is_encoder_decoder
    examples = load_examples(
        data_args.train_file, "train", data_args, tokenizer, None, seq2seq, args.process_index == 0
    )
    commit = getattr(
        AutoConfig.from_pretrained(args.teacher_model_name_or_path), "_commit_hash", None
    )
    description = cache.Description(
        teacher=args.teacher_model_name_or_path,
        revision=cache.teacher_revision(args.teacher_model_name_or_path, commit),
        tokenizer=cache.tokenizer_hash(tokenizer),
        temperature=args.temperature,
        top_k=args.top_k,
        tokens=min(len(tokenizer), teacher.get_output_embeddings().weight.shape[0]),
    )
    live = DistillationTrainer.place_teacher(teacher, args)

    def ask(inputs: dict[str, torch.Tensor]):
        inputs = {name: value.to(live.device) for name, value in inputs.items()}
        if seq2seq:
            ids = teacher.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])
            inputs = {**inputs, "decoder_input_ids": ids}
        batch = Batch.of(inputs, shifted=not seq2seq)
        observed = live.observe(batch.teacher, batch.rows)

        def logits_of(rows: slice) -> torch.Tensor:
            return observed.compute(lambda predictions: predictions.chunk(rows), live.device)

        return batch, logits_of

    try:
        count = cache.write_cache(
            args.teacher_cache, description, examples, data.Collator(pad_token_id(tokenizer)), ask,
            args.per_device_eval_batch_size, args.process_index, args.world_size,
            args.process_index == 0,
        )  # fmt: skip
    except cache.CacheError as error:
        raise InputError(str(error)) from error
    if args.process_index == 0:
        logger.info(
            "%s: %d examples added, %d were already there",
            args.teacher_cache,
            count,
            len(examples) - count,
        )
