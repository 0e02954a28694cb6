"""Train, evaluate and use a translation model with transformers' Seq2SeqTrainer. `--deepspeed`
shards it.

Without a model and data, this is a demonstration that needs no network. Its data comes from
examples/demonstration/cldr.py:

    torchrun --nproc_per_node 2 run_translation.py --deepspeed configs/ds_config_zero3.json
"""
# ruff: noqa: E402

import sys

from translation.options import APPLICATION

if __name__ == "__main__":
    APPLICATION.answer(sys.argv[1:])  # before the other imports, which take seconds

import zero.hf

# This must come first: transformers and accelerate look for the engine once, while they are
# imported.
zero.hf.enable()

import logging
from collections.abc import Callable
from typing import cast

import datasets
import numpy as np
import torch.distributed
import torch.utils.data
import transformers
from datasets import Dataset
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    set_seed,
)

from translation import data, report
from translation.arguments import (
    Arguments,
    checkpoint_of,
    is_demonstration,
    output_folder,
    parse_arguments,
)
from translation.model import load_model_and_tokenizer
from translation.records import InputError
from translation.trainer import GlobalTokenMean, TranslationTrainer
from zero.integrations.hf.preemption import SaveOnSigterm


def main() -> None:
    try:
        model_args, data_args, args = arguments = parse_arguments()
        start_logging(args)
        set_seed(args.seed)
        texts = data.load_splits(data_args, model_args, args, demonstration_corpus)
        trainer, tokens = make_trainer(texts, arguments)
        scores = {}
        if args.predict_with_generate:
            scores = {"bleu_signature": report.bleu_signature(data_args.target_lang)}
    except (InputError, ImportError) as error:
        APPLICATION.fail(str(error))
    if args.do_train:
        train(trainer, overwrite=data_args.overwrite_output_dir)
    if args.do_eval:
        evaluate(trainer, scores)
    if args.do_predict:
        predict(trainer, texts["test"], tokens["test"], data_args.target_lang, scores)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if is_demonstration(model_args, data_args) and args.do_train and args.process_index == 0:
        folder = output_folder(args)
        report.convert(folder, "float16" if args.fp16 else "bfloat16")
        from examples.demonstration.reload import reload_in_fresh_process

        held_out = texts.get("test") or texts.get("validation") or texts["train"]
        reload_in_fresh_process(folder, held_out["source"][:3])


def demonstration_corpus(source_lang: str, target_lang: str) -> object:
    """The three splits of the demonstration, which is a part of the checkout alone."""
    try:
        from examples.demonstration.cldr import build_corpus
    except ImportError as error:
        raise InputError(
            f"the demonstration's data cannot be made ({error}): give your own with --train_file, "
            "or run the script in a checkout with its extra installed"
        ) from error
    return build_corpus(source_lang, target_lang)


def start_logging(args: Seq2SeqTrainingArguments) -> None:
    """Rank 0 prints progress, and the other ranks print only warnings."""
    level = logging.INFO if args.process_index == 0 else logging.WARNING
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.WARNING)
    logging.getLogger("translation").setLevel(level)
    transformers.utils.logging.set_verbosity(args.get_process_log_level())
    if args.process_index != 0:
        datasets.disable_progress_bars()


def make_trainer(
    texts: dict[str, Dataset], arguments: Arguments
) -> tuple[TranslationTrainer, dict[str, Dataset]]:
    """Make tokenizer, tokens, model and trainer.

    Return the trainer and the tokens of each split.
    """
    _model_args, data_args, args = arguments
    model, tokenizer = load_model_and_tokenizer(texts, arguments)
    tokens = {
        split: data.tokenize(text, tokenizer, data_args, args, split)
        for split, text in texts.items()
    }
    # The Trainer takes datasets of `datasets`, but declares torch's.
    splits = cast(dict[str, torch.utils.data.Dataset], tokens)
    trainer = TranslationTrainer(
        model=model,
        args=args,
        train_dataset=splits.get("train"),
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
        data_collator=data.make_collator(tokenizer, model, data_args, args),
        compute_loss_func=GlobalTokenMean(args.label_smoothing_factor),
        compute_metrics=_scores(args, tokenizer, texts.get("validation"), data_args.target_lang),
        callbacks=[SaveOnSigterm()],
    )
    return trainer, tokens


def _scores(
    args: Seq2SeqTrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    text: Dataset | None,
    language: str | None,
) -> Callable[[EvalPrediction], dict[str, float]] | None:
    if text is None or not args.predict_with_generate:
        return None
    return report.make_compute_metrics(tokenizer, text["target"], language)


def train(trainer: TranslationTrainer, overwrite: bool) -> None:
    """Train and save."""
    config = cast(PreTrainedModel, trainer.model).config
    checkpoint = checkpoint_of(trainer.args, overwrite, config)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()


def evaluate(trainer: TranslationTrainer, scores: dict[str, str]) -> None:
    """Score the validation split. `scores`: more of them, for the report."""
    metrics = trainer.evaluate(metric_key_prefix="eval")
    metrics |= {f"eval_{name}": value for name, value in scores.items()}
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def predict(
    trainer: TranslationTrainer,
    text: Dataset,
    tokens: Dataset,
    language: str | None,
    scores: dict[str, str],
) -> None:
    """Translate and score the test split.

    Write the translations, one in each line, and print some.
    """
    trainer.compute_metrics = _scores(trainer.args, trainer.processing_class, text, language)
    result = trainer.predict(cast(torch.utils.data.Dataset, tokens), metric_key_prefix="predict")
    metrics = {**(result.metrics or {}), **{f"predict_{name}": scores[name] for name in scores}}
    trainer.log_metrics("predict", metrics)
    trainer.save_metrics("predict", metrics)
    if trainer.args.predict_with_generate and trainer.is_world_process_zero():
        translations = report.decode(np.asarray(result.predictions), trainer.processing_class)
        report.write_translations(output_folder(trainer.args), translations)
        report.print_samples(text, translations)


if __name__ == "__main__":
    main()
