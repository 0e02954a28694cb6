"""What the Trainer can do, by the name of the function in `scripts/features.py` that does it, and
what comes of it on this engine. The page docs/trainer-features.md has the table; the functions are
run by test_features.py. This file imports nothing, so that the page is made at once."""

from __future__ import annotations

from typing import NamedTuple

RIGHT = "as under DDP"


class Feature(NamedTuple):
    """A row of the table.

    Attributes:
        title: what is done, for the page.
        refused: words of the error that says what to do instead; "" where the result is that of
            DDP.
    """

    title: str
    refused: str = ""

    @property
    def row(self) -> str:
        return f"| {self.title} | {f'refused: “{self.refused}”' if self.refused else RIGHT} |"


FEATURES = {
    "plain": Feature("`train()`"),
    "accumulation": Feature("`gradient_accumulation_steps`"),
    "partial_accumulation": Feature("an epoch that ends within an accumulation"),
    "checkpointing": Feature("`gradient_checkpointing`"),
    "label_smoothing": Feature("`label_smoothing_factor`"),
    "neftune": Feature("`neftune_noise_alpha`"),
    "small_clipping": Feature("`max_grad_norm` that clips each step"),
    "no_clipping": Feature("`max_grad_norm=0`"),
    "weight_decay": Feature("`weight_decay`"),
    "adafactor": Feature('`optim="adafactor"`'),
    "sgd": Feature('`optim="sgd"` with momentum'),
    "cosine": Feature('`lr_scheduler_type="cosine"` with warm-up'),
    "plateau": Feature('`lr_scheduler_type="reduce_lr_on_plateau"`'),
    "optimizers": Feature("`Trainer(optimizers=...)`", "Override create_optimizer"),
    "optimizer_class": Feature("`optimizer_cls_and_kwargs`"),
    "own_optimizer": Feature("an overridden `create_optimizer`"),
    "rates_by_layer": Feature("param groups with rates of their own"),
    "evaluation": Feature("`eval_strategy`, with `compute_metrics`"),
    "evaluation_at_start": Feature("`eval_on_start`"),
    "evaluation_before": Feature(
        "`evaluate()` before `train()`", "do not call evaluate() before train()"
    ),
    "preprocessed_logits": Feature("`preprocess_logits_for_metrics`"),
    "prediction": Feature("`predict()` after `train()`"),
    "early_stopping": Feature("`EarlyStoppingCallback`"),
    "best_model": Feature("`load_best_model_at_end`"),
    "saved_model": Feature("`save_model()`, and `from_pretrained` of it"),
    "resumed": Feature("`resume_from_checkpoint`"),
    "resumed_stream": Feature("`resume_from_checkpoint` in a stream of data"),
    "limited_saves": Feature("`save_total_limit`"),
    "stream": Feature("an `IterableDataset`"),
    "dropped_last": Feature("`dataloader_drop_last`"),
    "own_loss": Feature("an overridden `compute_loss`"),
    "loss_function": Feature("`compute_loss_func`"),
    "frozen_layers": Feature("layers that are frozen before `Trainer(...)`"),
    "tied": Feature("tied embeddings"),
    "resized": Feature("`resize_token_embeddings` before `Trainer(...)`"),
    "classification": Feature("a model that classifies sequences"),
    "lora": Feature("LoRA"),
    "dora": Feature("DoRA"),
    "rate_of_callback": Feature("a callback that sets the learning rate"),
    "stop_of_callback": Feature("a callback that stops the training"),
    "generation": Feature("`generate` in a callback, on all ranks"),
    "counted_tokens": Feature("`include_num_input_tokens_seen`"),
    "averaged_tokens": Feature("`average_tokens_across_devices`"),
    "smaller_batches": Feature(
        "`auto_find_batch_size`", "isn't supported yet with DeepSpeed Zero-3. Please consider"
    ),
    "two_trainers": Feature("a Trainer after another one, with the same model"),
    "second_run": Feature("`train()` twice", "make a new Trainer with the same model"),
}


def table() -> str:
    """The table of the page."""
    rows = ["| with the Trainer | at stage 3 |", "|---|---|"]
    return "\n".join([*rows, *(feature.row for feature in FEATURES.values())]) + "\n"
