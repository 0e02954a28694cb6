"""run_distill.py with named models and data: load, train, score, export; and write a teacher
cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from distill import cache, data, export
from distill.alignment import encode_twice
from distill.arguments import Arguments
from distill.batch import IGNORED, Batch, with_decoder_inputs
from distill.config import DistillationConfig
from distill.importance import block_influence, most_influential
from distill.options import DataArguments, ModelArguments
from distill.student import (
    Layers,
    copy_layers,
    cut_config,
    depth,
    from_config,
    generation_config_of,
    load_config,
    parse_best,
    parse_layers,
    stacks,
)
from distill.teacher import LiveTeacher, Observed, load_model, require_same_kind
from distill.trainer import DistillationTrainer
from translation import report
from translation.arguments import checkpoint_of, output_folder
from translation.model import dtype_to_train_in
from translation.records import InputError, open_records, required
from translation.tokenizer import pad_token_id
from zero.integrations.hf.preemption import SaveOnSigterm

logger = logging.getLogger(__name__)

Examples = list[dict[str, list[int]]]

# How many examples show which layers of the teacher are best.
MEASURED_EXAMPLES = 64


def run(arguments: Arguments) -> None:
    """Train, evaluate and predict. Write the student, its card and the figures to
    `args.output_dir`.

    Raises:
        InputError: models, tokenizers or data cannot be loaded, or do not match.
    """
    model_args, data_args, args = arguments
    tokenizer, teacher_tokenizer = load_tokenizers(model_args, args)
    pairs = _student_kind(model_args, args).is_encoder_decoder
    if args.predict_with_generate and not pairs:
        raise InputError(
            "--predict_with_generate is for encoder-decoder models: a causal one would be given "
            "the answers together with the prompts"
        )
    splits = _load_splits(data_args, args, tokenizer, teacher_tokenizer, pairs)
    is_live = args.needs_teacher() and not args.teacher_cache
    quantization = _quantization(args)
    best = _best_layers(arguments, splits, tokenizer)
    teacher = None
    if model_args.init_student_from_teacher or (is_live and not quantization):
        teacher = _load_teacher(args, data_args, teacher_tokenizer)
    student = load_student(model_args, teacher, best, len(tokenizer), **dtype_to_train_in(args))
    _check_positions("student", student, data_args.max_length)
    # transformers' own default is 20 tokens.
    if getattr(student.generation_config, "max_length", None) in (None, 20):
        args.generation_max_length = args.generation_max_length or data_args.max_length
    if not is_live:
        teacher = None  # it was needed only to make the student
    elif quantization:
        teacher = _load_teacher(args, data_args, teacher_tokenizer, **quantization)
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
            callbacks=[SaveOnSigterm()],
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    figures = {}
    if args.do_train:
        checkpoint = checkpoint_of(args, data_args.overwrite_output_dir)
        result = trainer.train(resume_from_checkpoint=checkpoint)
        # An internal call does not push, which happens after conversion.
        trainer.save_model(_internal_call=True)
        figures["train_runtime"] = result.metrics["train_runtime"]
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        figures |= metrics
    if args.do_predict:
        figures |= _predict(trainer, splits["test"], data_args)
    if args.do_train and args.process_index == 0:
        folder, data_file = output_folder(args), required(data_args.train_file, "train_file")
        report.convert(folder, data_args.export_dtype)
        source = args.teacher_model_name_or_path or args.teacher_cache or "no teacher"
        export.write_card(folder, args, source, figures, data_file)
        if args.push_to_hub:
            export.push(folder, trainer)
        logger.info("student: %s (%s)", folder, data_args.export_dtype)


def _predict(
    trainer: DistillationTrainer, tokens: Examples, data_args: DataArguments
) -> dict[str, float]:
    """Score the test split. With generation, write the generated texts, one in each line."""
    tokenizer = trainer.processing_class
    if trainer.args.predict_with_generate and tokenizer:
        columns = data_args.source_column, data_args.target_column
        records = open_records(required(data_args.test_file, "test_file"), "--test_file", "test")
        references = [data.pair_of(record, where, *columns).target for where, record in records]
        trainer.compute_metrics = report.make_compute_metrics(tokenizer, references)
    # A list is a map-style dataset, though not by its type.
    result = trainer.predict(cast(Dataset, tokens), metric_key_prefix="predict")
    metrics = result.metrics or {}
    trainer.log_metrics("predict", metrics)
    trainer.save_metrics("predict", metrics)
    if trainer.args.predict_with_generate and trainer.is_world_process_zero() and tokenizer:
        texts = report.decode(np.asarray(result.predictions), tokenizer)
        report.write_translations(output_folder(trainer.args), texts)
    return metrics


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


def _quantization(args: DistillationConfig) -> dict[str, Any]:
    """Return the options of `from_pretrained` that quantize the teacher; none if it stays as it
    is.
    """
    if not (args.teacher_load_in_4bit or args.teacher_load_in_8bit):
        return {}
    compute = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    config = BitsAndBytesConfig(
        load_in_4bit=args.teacher_load_in_4bit,
        load_in_8bit=args.teacher_load_in_8bit,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute,
    )
    if args.deepspeed or args.teacher_deepspeed:
        return {"quantization_config": config}
    # A quantized model cannot be moved once it is loaded.
    device = args.teacher_device or args.device
    return {"quantization_config": config, "device_map": {"": device}}


def _load_teacher(
    args: DistillationConfig,
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase | None,
    **options: object,
) -> PreTrainedModel:
    name = required(args.teacher_model_name_or_path, "teacher_model_name_or_path")
    try:
        teacher = load_model(name, **options)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise InputError(f"--teacher_model_name_or_path {name}: {error}") from error
    if tokenizer is not None:
        _check_vocabulary("teacher_model_name_or_path", teacher, len(tokenizer))
    _check_positions("teacher", teacher, data_args.max_length)
    return teacher


def _check_vocabulary(argument: str, model: PreTrainedModel, tokens: int) -> None:
    rows = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    if rows < tokens:
        raise InputError(
            f"--{argument}: the model has embeddings for {rows} tokens and its tokenizer has "
            f"{tokens}: the two do not"
            " belong together; name the model's own tokenizer"
        )


def _check_positions(whose: str, model: PreTrainedModel, max_length: int) -> None:
    """Raise InputError if the model has a table of positions that ends before `max_length`."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", 0)
    tables = [
        module.num_embeddings - getattr(module, "offset", 0)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and ("pos" in name or "wpe" in name)
    ]
    if positions in tables and max_length > positions:
        raise InputError(
            f"--max_length {max_length}: the {whose} has only {positions} positions; give at most "
            f"--max_length {positions}"
        )


def _student_kind(model_args: ModelArguments, args: DistillationConfig) -> PretrainedConfig:
    """Return a configuration of the student's kind: its own, or the teacher's."""
    names = {
        "model_name_or_path": model_args.model_name_or_path,
        "student_config": model_args.student_config,
        "teacher_model_name_or_path": args.teacher_model_name_or_path,
    }
    given = {argument: load_config(name, argument) for argument, name in names.items() if name}
    student, teacher = next(iter(given.values())), given.get("teacher_model_name_or_path")
    if teacher is not None:
        try:
            require_same_kind(student, teacher)
        except ValueError as error:
            raise InputError(f"--teacher_model_name_or_path: {error}") from error
    return student


def _best_layers(
    arguments: Arguments,
    splits: dict[str, Examples],
    tokenizer: PreTrainedTokenizerBase,
) -> Layers | None:
    """Return the layers that `--init_student_from_teacher best:N` means; None if it gives numbers.

    The teacher runs on the first examples. It is loaded for this alone, because its engine may
    round its weights, and the student is made of the exact ones.
    """
    model_args, data_args, args = arguments
    text = model_args.init_student_from_teacher
    if text is None:
        return None
    name = required(args.teacher_model_name_or_path, "teacher_model_name_or_path")
    count = parse_best(text, depth(load_config(name, "teacher_model_name_or_path")))
    if count is None:
        return None
    teacher = _load_teacher(args, data_args, tokenizer, **_quantization(args))
    live = DistillationTrainer.place_teacher(teacher, args)
    examples = next(iter(splits.values()))[:MEASURED_EXAMPLES]
    size = args.per_device_train_batch_size
    collate = data.Collator(pad_token_id(tokenizer))
    batches = (collate(examples[at : at + size]) for at in range(0, len(examples), size))
    influence = block_influence(live, batches)
    best = broadcast_object_list([most_influential(influence, count)])[0]
    for stack, layers in best.items():
        of_all = ", ".join(f"{value:.3f}" for value in influence[stack])
        logger.info("student: layers %s of the teacher's %s (influence: %s)", layers, stack, of_all)
    return best


def load_student(
    model_args: ModelArguments,
    teacher: PreTrainedModel | None,
    best: Layers | None,
    tokens: int,
    **options: object,
) -> PreTrainedModel:
    """Return the student: a named model, a new one from a configuration, or some layers of the
    teacher (`best`, or those whose numbers are given). `options` go to transformers.
    """
    if model_args.model_name_or_path:
        try:
            student = load_model(model_args.model_name_or_path, **options)
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(
                f"--model_name_or_path {model_args.model_name_or_path}: {error}"
            ) from error
        _check_vocabulary("model_name_or_path", student, tokens)
        return student
    if teacher is None or not model_args.init_student_from_teacher:
        name = required(model_args.student_config, "student_config")
        return _new_student(load_config(name), tokens, **options)
    layers = best or dict.fromkeys(
        stacks(teacher),
        parse_layers(model_args.init_student_from_teacher, depth(teacher.config)),
    )
    config = cut_config(teacher.config, layers)
    if model_args.student_config:
        config = load_config(model_args.student_config)
    student = _new_student(config, tokens, **options)
    copy_layers(student, teacher, layers)
    if teacher.generation_config is not None:  # it can generate
        student.generation_config = generation_config_of(teacher)
    return student


def _new_student(config: PretrainedConfig, tokens: int, **options: object) -> PreTrainedModel:
    vocab_size = config.get_text_config().vocab_size
    if vocab_size < tokens:
        raise InputError(
            f"the student's vocab_size is {vocab_size} and its tokenizer has {tokens} tokens: set "
            "vocab_size in --student_config to at least that"
        )
    return from_config(config, **options)


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
    if data_args.source_prefix and not pairs:
        raise InputError(
            "--source_prefix is for encoder-decoder models, and the student is a causal one: "
            "leave it out, and put the words into the data"
        )
    records = tqdm(
        open_records(name, f"--{split}_file", split),
        desc=f"reading the {split} split",
        disable=not show_progress,
    )
    length = data_args.max_length
    packing = data_args.packing and not written
    if pairs:
        columns = data_args.source_column, data_args.target_column
        texts = (data.pair_of(record, where, *columns) for where, record in records)
        texts = _with_words(texts, lambda pair: pair.target, argument)
        prefix = data_args.source_prefix or ""
        examples = [data.encode_pair(pair, tokenizer, length, prefix) for pair in texts]
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
            whole = [data.encode(text, tokenizer) for text in texts]
            examples = [data.cut(example, length) for example in whole]
            tokens, kept = (sum(len(e["input_ids"]) for e in each) for each in (whole, examples))
            if kept < tokens and show_progress:
                logger.warning(
                    "%s: examples are not packed here, so %d of %d tokens that come after "
                    "--max_length %d are left out", argument, tokens - kept, tokens, length,
                )  # fmt: skip
    first = 0 if pairs else 1  # nothing comes before a causal model's first token
    if not any(label != IGNORED for each in examples for label in each["labels"][first:]):
        raise InputError(
            f"{argument}: no answer begins within --max_length {length}, so there is nothing to "
            "learn; make it larger"
        )
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
        InputError: as `run`.
        CacheError: the folder holds another cache.
    """
    model_args, data_args, args = arguments
    name = required(args.teacher_model_name_or_path, "teacher_model_name_or_path")
    folder = required(args.teacher_cache, "teacher_cache")
    data_file = required(data_args.train_file, "train_file")
    tokenizer, own = load_tokenizers(model_args, args)
    if own is not None and cache.tokenizer_hash(own) != cache.tokenizer_hash(tokenizer):
        raise InputError(
            f"cache_teacher reads the data with the tokenizer of {name}: leave out "
            "--tokenizer_name and --model_name_or_path, which have another one"
        )
    teacher = _load_teacher(args, data_args, tokenizer, **_quantization(args))
    is_first = args.process_index == 0
    examples = load_examples(
        data_file,
        "train",
        data_args,
        tokenizer,
        None,
        pairs=teacher.config.is_encoder_decoder,
        show_progress=is_first,
    )
    commit = getattr(AutoConfig.from_pretrained(name), "_commit_hash", None)
    head = cast(nn.Linear, teacher.get_output_embeddings())
    tokens = min(len(tokenizer), head.weight.shape[0])
    if args.top_k >= tokens:
        raise InputError(
            f"--top_k {args.top_k}: it must be less than the {tokens} tokens of the vocabulary"
        )
    description = cache.Description(
        teacher=name,
        revision=cache.teacher_revision(name, commit),
        tokenizer=cache.tokenizer_hash(tokenizer),
        temperature=args.temperature,
        top_k=args.top_k,
        tokens=tokens,
        sampling=args.cache_sampling,
    )
    live = DistillationTrainer.place_teacher(teacher, args)
    count = cache.write_cache(
        folder,
        description,
        examples,
        data.Collator(pad_token_id(tokenizer)),
        partial(ask, live),
        args.per_device_eval_batch_size,
        args.process_index,
        args.world_size,
        is_first,
    )
    if is_first:
        already = len(examples) - count
        logger.info("%s: %d examples added, %d were already there", folder, count, already)


def ask(
    teacher: LiveTeacher, inputs: dict[str, torch.Tensor]
) -> tuple[Batch, Callable[[slice], torch.Tensor]]:
    """Run the teacher on a batch. Return its parts, and a function that gives the logits of a slice
    of its targets.
    """
    moved = {name: value.to(teacher.device) for name, value in inputs.items()}
    shifted = not teacher.model.config.is_encoder_decoder
    isolates = "position_ids" not in inputs or teacher.isolates
    batch = Batch.of(with_decoder_inputs(moved, teacher.model), shifted, isolates)
    observed = teacher.observe(batch.teacher, batch.rows)
    return batch, partial(_logits, observed, teacher.device)


def _logits(observed: Observed, device: torch.device, rows: slice) -> torch.Tensor:
    return observed.compute(lambda predictions: predictions.chunk(rows), device)
