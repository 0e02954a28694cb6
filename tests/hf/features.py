"""What the Trainer can do, by the name of the function in `scripts/features.py` that does it, or
with its arguments, and what comes of it on this engine. The page docs/trainer-features.md has the
table; the functions are run by test_features.py. This file imports no torch, so that the page is
made at once."""

from __future__ import annotations

import ast
import re
from typing import Any

RIGHT = "as under DDP"


EVALUATES: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1}
BEST = EVALUATES | {
    "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
}  # fmt: skip


class Feature:
    """A row of the table.

    Attributes:
        title: what is done, for the page.
        refused: words of the error that says what to do instead; "" where the result is that of
            DDP.
        ends: whether these words are in the report with which the watchdog ends the job.
        arguments: what `TrainingArguments` are given, beside what the title has as `key=value`.
    """

    def __init__(self, title: str, refused: str = "", ends: bool = False, **arguments: Any):
        self.title, self.refused, self.ends = title, refused, ends
        shown = re.findall(r"`(\w+)=([^`]+)`", title)
        self.arguments = {key: ast.literal_eval(value) for key, value in shown}
        self.arguments = arguments | self.arguments

    @property
    def row(self) -> str:
        what = "the job ends" if self.ends else "refused"
        return f"| {self.title} | {f'{what}: “{self.refused}”' if self.refused else RIGHT} |"


FEATURES = {
    "plain": Feature("`train()`"),
    "model_init": Feature("`model_init`"),
    "accumulation": Feature("`gradient_accumulation_steps`", gradient_accumulation_steps=2),
    "partial_accumulation": Feature(
        "an epoch that ends within an accumulation",
        gradient_accumulation_steps=3,
        max_steps=-1,
        num_train_epochs=2,
    ),
    "checkpointing": Feature("`gradient_checkpointing`", gradient_checkpointing=True),
    "reentrant": Feature(
        '`gradient_checkpointing_kwargs={"use_reentrant": True}`', gradient_checkpointing=True
    ),
    "compiled": Feature("`torch_compile`", torch_compile=True, torch_compile_backend="aot_eager"),
    "deterministic": Feature("`full_determinism`", full_determinism=True),
    "label_smoothing": Feature("`label_smoothing_factor`", label_smoothing_factor=0.1),
    "neftune": Feature("`neftune_noise_alpha`", neftune_noise_alpha=5.0),
    "small_clipping": Feature("`max_grad_norm` that clips each step", max_grad_norm=1e-3),
    "no_clipping": Feature("`max_grad_norm=0`"),
    "weight_decay": Feature("`weight_decay`", weight_decay=0.5),
    "nan_filter": Feature("`logging_nan_inf_filter`, with a loss that is NaN"),
    "underflow": Feature('`debug="underflow_overflow"`'),
    "adafactor": Feature('`optim="adafactor"`'),
    "sgd": Feature('`optim="sgd"` with momentum', optim_args="momentum=0.9"),
    "adagrad": Feature('`optim="adagrad"`'),
    "rmsprop": Feature('`optim="rmsprop"`'),
    "adamw_8bit": Feature('`optim="adamw_8bit"`'),
    "adamw_torch_8bit": Feature('`optim="adamw_torch_8bit"`'),
    "lion": Feature('`optim="lion_32bit"`'),
    "ademamix": Feature('`optim="ademamix"`'),
    "schedule_free": Feature('`optim="schedule_free_adamw"`'),
    "apollo": Feature(
        '`optim="apollo_adamw"` with `optim_target_modules`',
        optim_target_modules=["q_proj", "v_proj"],
        optim_args="rank=2,scale=1.0,update_proj_gap=2",
    ),
    "cosine": Feature('`lr_scheduler_type="cosine"` with warm-up', warmup_steps=1),
    "stable_decay": Feature(
        '`lr_scheduler_type="warmup_stable_decay"` with `lr_scheduler_kwargs`',
        lr_scheduler_kwargs={"num_decay_steps": 1},
        warmup_steps=1,
    ),
    "plateau": Feature('`lr_scheduler_type="reduce_lr_on_plateau"`', **EVALUATES),
    "optimizers": Feature("`Trainer(optimizers=...)`", "Override create_optimizer"),
    "optimizer_class": Feature("`optimizer_cls_and_kwargs`"),
    "own_optimizer": Feature("an overridden `create_optimizer`"),
    "rates_by_layer": Feature("param groups with rates of their own"),
    "evaluation": Feature("`eval_strategy`, with `compute_metrics`", **EVALUATES),
    "evaluation_at_start": Feature("`eval_on_start`", eval_on_start=True, **EVALUATES),
    "evaluation_before": Feature(
        "`evaluate()` before `train()`", "do not call evaluate() before train()"
    ),
    "several_evaluations": Feature("an `eval_dataset` of several"),
    "accumulated_evaluation": Feature("`eval_accumulation_steps=1`", **EVALUATES),
    "batch_metrics": Feature("`batch_eval_metrics=True`", **EVALUATES),
    "more_for_metrics": Feature('`include_for_metrics=["inputs", "loss"]`', **EVALUATES),
    "preprocessed_logits": Feature("`preprocess_logits_for_metrics`", **EVALUATES),
    "bf16_evaluation": Feature(
        "`bf16_full_eval`, and `evaluate()` after `train()`",
        "enable bf16 or fp16 in the configuration",
    ),
    "prediction": Feature("`predict()` after `train()`"),
    "predict_with_generate": Feature("`Seq2SeqTrainer`, with `predict_with_generate`"),
    "evaluated_alone": Feature("the same, and `evaluate()`, without `train()`"),
    "early_stopping": Feature("`EarlyStoppingCallback`"),
    "best_model": Feature("`load_best_model_at_end`"),
    "saved_best": Feature('`save_strategy="best"`', **BEST),
    "saved_model": Feature("`save_model()`, and `from_pretrained` of it"),
    "only_model": Feature("`save_only_model`, and `from_pretrained` of a checkpoint"),
    "only_best_model": Feature(
        "`save_only_model` with `load_best_model_at_end`",
        "can't be used with `save_only_model` along with `load_best_model_at_end`",
        save_only_model=True,
        **BEST,
    ),
    "resumed": Feature("`resume_from_checkpoint`"),
    "resumed_stream": Feature("`resume_from_checkpoint` in a stream of data"),
    "data_not_skipped": Feature("`resume_from_checkpoint` with `ignore_data_skip`"),
    "restored_callback": Feature("`restore_callback_states_from_checkpoint`"),
    "limited_saves": Feature("`save_total_limit`"),
    "stream": Feature("an `IterableDataset`"),
    "dropped_last": Feature("`dataloader_drop_last`"),
    "workers": Feature("`dataloader_num_workers=1`", dataloader_persistent_workers=True),
    "grouped": Feature('`train_sampling_strategy="group_by_length"`'),
    "named_labels": Feature("`label_names` with `remove_unused_columns=False`"),
    "own_loss": Feature("an overridden `compute_loss`"),
    "loss_function": Feature("`compute_loss_func`"),
    "frozen_layers": Feature("layers that are frozen before `Trainer(...)`"),
    "unfreezing": Feature("a callback that unfreezes layers", max_steps=4),
    "alternating": Feature("a callback that freezes and unfreezes layers in turns"),
    "tied": Feature("tied embeddings"),
    "resized": Feature("`resize_token_embeddings` before `Trainer(...)`"),
    "classification": Feature("a model that classifies sequences"),
    "encoder_decoder": Feature("a model with an encoder and a decoder"),
    "experts": Feature("a model with experts"),
    "images": Feature("a model with images, where texts without one get a blank one"),
    "images_on_one_rank": Feature(
        "the same without it, and images on one rank only", "give the others a blank one", ends=True
    ),
    "layer_drop": Feature("LayerDrop, with one seed on all ranks"),
    "layer_drop_by_rank": Feature(
        "LayerDrop, with another seed on each rank", "from one seed on all ranks", ends=True
    ),
    "lora": Feature("LoRA"),
    "dora": Feature("DoRA"),
    "adalora": Feature("AdaLoRA, all of whose ranks are trained"),
    "allocating": Feature(
        "AdaLoRA, with `update_and_allocate` in a callback", "train LoRA, or AdaLoRA without"
    ),
    "prompts": Feature("prompt tuning"),
    "ia3": Feature("IA³"),
    "rate_of_callback": Feature("a callback that sets the learning rate"),
    "stop_of_callback": Feature("a callback that stops the training"),
    "averaged_model": Feature("`AveragedModel` in a callback, inside `GatheredParameters`"),
    "averaged_alone": Feature(
        "`AveragedModel` in a callback, without it", "with zero.GatheredParameters"
    ),
    "generation": Feature("`generate` in a callback, on all ranks"),
    "counted_tokens": Feature('`include_num_input_tokens_seen="all"`'),
    "averaged_tokens": Feature("`average_tokens_across_devices=True`"),
    "smaller_batches": Feature(
        "`auto_find_batch_size=True`", "isn't supported yet with DeepSpeed Zero-3. Please consider"
    ),
    "search": Feature("`hyperparameter_search`"),
    "two_trainers": Feature("a Trainer after another one, with the same model"),
    "second_run": Feature("`train()` twice", "make a new Trainer with the same model"),
}


def table() -> str:
    """The table of the page."""
    rows = ["| with the Trainer | at stage 3 |", "|---|---|"]
    return "\n".join([*rows, *(feature.row for feature in FEATURES.values())]) + "\n"
