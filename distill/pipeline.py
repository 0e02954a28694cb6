"""run_distill.py with named models and data: load, train, score, export; and write a teacher
cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from distill import cache, data, export
from distill.arguments import Arguments
from distill.batch import Batch, with_decoder_inputs
from distill.config import DistillationConfig
from distill.examples import Encoding, Examples, encoding_of, make_examples, stream_examples
from distill.importance import block_influence, most_influential
from distill.options import ModelArguments
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
from distill.teacher import LiveTeacher, Observed, load_model, load_teacher, require_same_kind
from distill.trainer import DistillationTrainer
from translation import report
from translation.arguments import checkpoint_of, output_folder
from translation.model import of_model
from translation.records import InputError, Records, open_records, required
from translation.tokenizer import pad_token_id
from zero.integrations.hf.preemption import SaveOnSigterm

logger = logging.getLogger(__name__)

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
    if args.predict_with_generate:
        report.bleu_signature(_language(args))  # an error before the training
    splits = _load_splits(arguments, tokenizer, teacher_tokenizer, pairs)
    is_live = args.needs_teacher() and not args.teacher_cache
    quantization = _quantization(args)
    best = _best_layers(arguments, splits, tokenizer)
    teacher = None
    if model_args.init_student_from_teacher or (is_live and not quantization):
        teacher = _load_teacher(arguments, teacher_tokenizer)
    student = load_student(model_args, teacher, best, len(tokenizer), **of_model(model_args, args))
    _check_positions("student", student, args.max_length)
    # transformers' own default is 20 tokens.
    if getattr(student.generation_config, "max_length", None) in (None, 20):
        args.generation_max_length = args.generation_max_length or args.max_length
    if not is_live:
        teacher = None  # it was needed only to make the student
    elif quantization:
        teacher = _load_teacher(arguments, teacher_tokenizer, **quantization)
    if model_args.use_peft:
        student = _with_adapters(student, model_args)
    try:
        trainer = DistillationTrainer(
            student,
            teacher,
            args,
            train_dataset=splits.get("train"),
            eval_dataset=splits.get("validation"),
            processing_class=tokenizer,
            teacher_processing_class=teacher_tokenizer,
            callbacks=[SaveOnSigterm()],
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    figures = {}
    if args.do_train:
        checkpoint = checkpoint_of(args, data_args.overwrite_output_dir, student.config)
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
        figures |= _predict(trainer, splits["test"], arguments)
    if args.do_train and model_args.merge_adapters:
        export.save_merged(trainer, output_folder(args))
    if args.do_train and args.process_index == 0:
        folder, data_file = output_folder(args), required(data_args.train_file, "train_file")
        base = model_args.model_name_or_path if model_args.use_peft else None
        if base is None or model_args.merge_adapters:
            report.convert(folder, data_args.export_dtype)
        source = args.teacher_model_name_or_path or args.teacher_cache or "no teacher"
        export.write_card(folder, args, source, figures, data_file, base)
        if args.push_to_hub:
            export.push(folder, trainer)
        logger.info("student: %s (%s)", folder, data_args.export_dtype)


def _predict(
    trainer: DistillationTrainer, tokens: Examples, arguments: Arguments
) -> dict[str, float]:
    """Score the test split. With generation, write the generated texts, one in each line."""
    tokenizer, scores = trainer.processing_class, {}
    if trainer.args.predict_with_generate and tokenizer:
        columns = trainer.args.source_column, trainer.args.target_column
        records = _open_split(arguments, "test")
        references = [data.pair_of(record, where, *columns).target for where, record in records]
        language = _language(trainer.args)
        trainer.compute_metrics = report.make_compute_metrics(tokenizer, references, language)
        scores = {"predict_bleu_signature": report.bleu_signature(language)}
    # The Trainer takes datasets of `datasets`, but declares torch's.
    result = trainer.predict(cast(Any, tokens), metric_key_prefix="predict")
    metrics = {**(result.metrics or {}), **scores}
    trainer.log_metrics("predict", metrics)
    trainer.save_metrics("predict", metrics)
    if trainer.args.predict_with_generate and trainer.is_world_process_zero() and tokenizer:
        texts = report.decode(np.asarray(result.predictions), tokenizer)
        report.write_translations(output_folder(trainer.args), texts)
    return metrics


def _language(args: DistillationConfig) -> str:
    """Return the last part of the column of the targets, which is often their language."""
    return (args.target_column or "").rpartition(".")[2]


# -- models and tokenizers


def load_tokenizers(
    model_args: ModelArguments, args: DistillationConfig
) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase | None]:
    """Return the tokenizers of student and teacher;

    None for the teacher if no teacher model is named.
    """
    hub, of_teacher = model_args.of_hub(), None
    if name := args.teacher_model_name_or_path:
        of_hub = args.of_teachers_hub(hub)
        of_teacher = _load_tokenizer("teacher_model_name_or_path", name, **of_hub)
    for argument in ("tokenizer_name", "model_name_or_path"):
        if name := getattr(model_args, argument):
            return _load_tokenizer(argument, name, **hub), of_teacher
    if of_teacher is None:
        raise InputError(
            "there is no tokenizer: give --tokenizer_name (that of the teacher, with a cache)"
        )
    return of_teacher, of_teacher


def _load_tokenizer(argument: str, name: str, **hub: object) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **hub)
    except (OSError, ValueError) as error:
        raise InputError(f"--{argument} {name}: no tokenizer can be loaded ({error})") from error
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
    arguments: Arguments, tokenizer: PreTrainedTokenizerBase | None, **options: object
) -> PreTrainedModel:
    model_args, _, args = arguments
    try:
        teacher = load_teacher(args, model_args.of_hub(), **options)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        name = args.teacher_model_name_or_path
        raise InputError(f"--teacher_model_name_or_path {name}: {error}") from error
    if tokenizer is not None:
        _check_vocabulary("teacher_model_name_or_path", teacher, len(tokenizer))
    _check_positions("teacher", teacher, args.max_length)
    return teacher


def _check_vocabulary(argument: str, model: PreTrainedModel, tokens: int) -> None:
    rows = cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]
    if rows < tokens:
        raise InputError(
            f"--{argument}: the model has embeddings for {rows} tokens and its tokenizer has "
            f"{tokens}: the two do not belong together; name the model's own tokenizer"
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
    hub = model_args.of_hub()
    names = {
        "model_name_or_path": (model_args.model_name_or_path, hub),
        "student_config": (model_args.student_config, hub),
        "teacher_model_name_or_path": (
            args.teacher_model_name_or_path,
            args.of_teachers_hub(hub),
        ),
    }
    given = {
        argument: load_config(name, argument, **where)
        for argument, (name, where) in names.items()
        if name
    }
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
    model_args, _, args = arguments
    text = model_args.init_student_from_teacher
    if text is None:
        return None
    name = required(args.teacher_model_name_or_path, "teacher_model_name_or_path")
    hub = args.of_teachers_hub(model_args.of_hub())
    count = parse_best(text, depth(load_config(name, "teacher_model_name_or_path", **hub)))
    if count is None:
        return None
    teacher = _load_teacher(arguments, tokenizer, **_quantization(args))
    live = DistillationTrainer.place_teacher(teacher, args)
    examples = list(islice(next(iter(splits.values())), MEASURED_EXAMPLES))
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
    hub = model_args.of_hub()
    if model_args.model_name_or_path:
        try:
            student = load_model(model_args.model_name_or_path, hub, **options)
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(
                f"--model_name_or_path {model_args.model_name_or_path}: {error}"
            ) from error
        _check_vocabulary("model_name_or_path", student, tokens)
        return student
    options |= {"trust_remote_code": model_args.trust_remote_code}
    if teacher is None or not model_args.init_student_from_teacher:
        name = required(model_args.student_config, "student_config")
        return _new_student(load_config(name, **hub), tokens, **options)
    layers = best or dict.fromkeys(
        stacks(teacher),
        parse_layers(model_args.init_student_from_teacher, depth(teacher.config)),
    )
    config = cut_config(teacher.config, layers)
    if model_args.student_config:
        config = load_config(model_args.student_config, **hub)
    student = _new_student(config, tokens, **options)
    copy_layers(student, teacher, layers)
    if teacher.generation_config is not None:  # it can generate
        student.generation_config = generation_config_of(teacher)
    return student


def _with_adapters(student: PreTrainedModel, args: ModelArguments) -> PreTrainedModel:
    """Return the student as a PEFT model, of which only LoRA adapters are trained."""
    from peft import LoraConfig, get_peft_model  # an optional package

    targets = args.lora_target_modules
    config = LoraConfig(
        task_type="SEQ_2_SEQ_LM" if student.config.is_encoder_decoder else "CAUSAL_LM",
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets[0] if targets and len(targets) == 1 else targets,
    )
    try:
        return cast(PreTrainedModel, get_peft_model(student, config))
    except ValueError as error:
        raise InputError(f"--lora_target_modules: {error}") from error


def _new_student(config: PretrainedConfig, tokens: int, **options: object) -> PreTrainedModel:
    vocab_size = config.get_text_config().vocab_size
    if vocab_size < tokens:
        raise InputError(
            f"the student's vocab_size is {vocab_size} and its tokenizer has {tokens} tokens: set "
            "vocab_size in --student_config to at least that"
        )
    try:
        return from_config(config, **options)
    except ValueError as error:
        raise InputError(f"the student cannot be made: {error}") from error


# -- data


def _load_splits(
    arguments: Arguments,
    tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase | None,
    pairs: bool,
) -> dict[str, Examples]:
    args = arguments[2]
    wanted = {"train": args.do_train, "validation": args.do_eval, "test": args.do_predict}
    uld = args.loss_type == "uld" and teacher_tokenizer is not None
    if uld and pairs:
        raise InputError(
            "loss_type uld works for causal models only: use a student with the teacher's tokenizer"
        )
    encoding = encoding_of(args, tokenizer, pairs, teacher_tokenizer if uld else None)
    return {split: load_examples(arguments, split, encoding) for split in wanted if wanted[split]}


def load_examples(arguments: Arguments, split: str, encoding: Encoding) -> Examples:
    """Return the token ids of a split: packed blocks, single examples, or pairs. All ranks call
    this together.

    Raises:
        InputError: the data cannot be read, or there is nothing to learn.
    """
    model_args, data_args, args = arguments
    if split == "train":
        encoding = replace(encoding, first_tokens=data_args.max_train_tokens)
    elif split == "validation":
        encoding = replace(encoding, first_examples=data_args.max_eval_samples)
    if data_args.streaming and split == "train":
        return stream_examples(_open_split(arguments, split, streaming=True), encoding)
    open_split = partial(_open_split, arguments, split)
    examples = make_examples(open_split, encoding, args, model_args.cache_dir)
    kind = "examples"
    if "position_ids" in examples.column_names:
        kind = f"blocks of {encoding.length} tokens, into which texts are packed"
    logger.info("--%s_file: %d %s", split, len(examples), kind)
    return examples


def _open_split(arguments: Arguments, split: str, **options: Any) -> Records:
    model_args, data_args, _ = arguments
    name = required(getattr(data_args, f"{split}_file"), f"{split}_file")
    return open_records(name, f"--{split}_file", split, **model_args.of_datasets(), **options)


# -- the teacher cache


def cache_teacher(arguments: Arguments) -> None:
    """Write the teacher's probabilities for the training data to `--teacher_cache`.

    Raises:
        InputError: as `run`.
        CacheError: the folder holds another cache.
    """
    model_args, _, args = arguments
    name = required(args.teacher_model_name_or_path, "teacher_model_name_or_path")
    folder = required(args.teacher_cache, "teacher_cache")
    tokenizer, own = load_tokenizers(model_args, args)
    if own is not None and cache.tokenizer_hash(own) != cache.tokenizer_hash(tokenizer):
        raise InputError(
            f"cache_teacher reads the data with the tokenizer of {name}: leave out "
            "--tokenizer_name and --model_name_or_path, which have another one"
        )
    teacher = _load_teacher(arguments, tokenizer, **_quantization(args))
    is_first = args.process_index == 0
    encoding = encoding_of(args, tokenizer, teacher.config.is_encoder_decoder)
    examples = cast(Any, load_examples(arguments, "train", encoding))
    commit = getattr(teacher.config, "_commit_hash", None)
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
