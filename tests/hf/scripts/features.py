"""What the Trainer can do, one after another. An ordinary transformers script.

`python features.py FOLDER [DEEPSPEED.json]`: each rank writes FOLDER/rankN.json, which has by
function the losses and the other numbers that it gave, or the words of its error. Names and order
are those of `tests.hf.features`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from tests.hf.features import FEATURES

FOLDER = Path(sys.argv[1])
DEEPSPEED = sys.argv[2] if len(sys.argv) > 2 else None
CLASSIFIER = FOLDER / "classifier"
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 40, "max_position_embeddings": 16, "use_cache": False,
}  # fmt: skip


class Tokens(Dataset):
    """Samples that are easy to learn: the next token is one more."""

    def __init__(self, samples: int = 16, labels: int = 0):
        self.samples, self.labels = samples, labels

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = (torch.arange(8) + 3 * index) % 39 + 1
        return {"input_ids": ids, "labels": index % self.labels if self.labels else ids}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from (Tokens(64)[index] for index in range(64))


def arguments(name: str, **others: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "use_cpu": True, "seed": 5, "lr_scheduler_type": "constant",
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(str(FOLDER / name), deepspeed=DEEPSPEED, **settings | others)


def model(kind: type = LlamaForCausalLM, **others: Any) -> Any:
    set_seed(1)
    return kind(LlamaConfig(**SIZES | {"pad_token_id": 0, "tie_word_embeddings": False} | others))


def trainer(
    name: str, net: Any = None, kind: type = Trainer, data: Any = None, **others: Any
) -> Any:
    """A Trainer. `others` beginning with `with_` are its own arguments, the rest those of
    `TrainingArguments`.
    """
    own = {key.removeprefix("with_"): each for key, each in others.items() if "with_" in key}
    given = {key: each for key, each in others.items() if "with_" not in key}
    args = arguments(name, **given)  # first: it decides how models are built
    net = net() if net is not None else model()
    set_seed(2)
    data = Tokens() if data is None else data
    return kind(net, args, train_dataset=data, eval_dataset=Tokens(8), **own)


def numbers(trained: Any) -> list[float]:
    """The losses, evaluations and rates that were logged, and the steps."""
    kept = ("loss", "learning_rate", "eval_loss", "eval_right", "num_input_tokens_seen")
    log = trained.state.log_history
    return [float(entry[key]) for entry in log for key in kept if key in entry] + [
        float(trained.state.global_step)
    ]


def run(name: str, net: Any = None, resume: Any = None, **others: Any) -> list[float]:
    made = trainer(name, net, **others)
    made.train(resume_from_checkpoint=resume)
    return numbers(made)


def right(prediction: Any) -> dict[str, float]:
    found = prediction.predictions
    found = found if found.ndim == 2 else found.argmax(-1)
    return {"right": float((found == prediction.label_ids).mean())}


# -- what is not one argument


class OwnOptimizer(Trainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        return self.optimizer


class RatesByLayer(Trainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        first = list(self.model.model.parameters())
        rest = [each for name, each in self.model.named_parameters() if "lm_head" in name]
        groups = [{"params": first, "lr": 1e-3}, {"params": rest, "lr": 1e-2}]
        self.optimizer = torch.optim.AdamW(groups)
        return self.optimizer


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class SetRate(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = 1e-2 / (1 + state.global_step)


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


class Write(TrainerCallback):
    """Generates after each step, and keeps what was written."""

    def __init__(self) -> None:
        self.written: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        net, start = kwargs["model"], torch.tensor([[3, 4]])
        net.eval()
        with torch.no_grad():
            out = net.generate(
                start, attention_mask=torch.ones_like(start), max_new_tokens=3, do_sample=False,
                synced_gpus=DEEPSPEED is not None,
            )  # fmt: skip
        net.train()
        self.written += out[0].tolist()


def mean_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


def first_layer_frozen() -> Any:
    net = model()
    net.model.embed_tokens.requires_grad_(False)
    net.model.layers[0].requires_grad_(False)
    return net


def resized() -> Any:
    net = model()
    net.resize_token_embeddings(44, mean_resizing=False)
    set_seed(3)
    return net


def adapted(**others: Any) -> Any:
    set_seed(4)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **others)
    net = model()
    set_seed(4)
    return get_peft_model(net, config)


def optimizers(name: str) -> list[float]:
    def own(made: Any) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(made.parameters(), lr=0.5), None

    args, net = arguments(name), model()
    made = Trainer(net, args, train_dataset=Tokens(), optimizers=own(net))
    made.train()
    return numbers(made)


def evaluation_before(name: str) -> list[float]:
    made = trainer(name)
    before = made.evaluate()["eval_loss"]
    made.train()
    return [before, *numbers(made)]


def prediction(name: str) -> list[float]:
    made = trainer(name)
    made.train()
    found = made.predict(Tokens(6))
    return [*numbers(made), found.metrics["test_loss"], float(abs(found.predictions).sum())]


def early_stopping(name: str) -> list[float]:
    stops = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=100.0)
    return run(name, max_steps=8, with_callbacks=[stops], **BEST)


BEST: dict[str, Any] = {
    "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
    "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
}  # fmt: skip


def best_model(name: str) -> list[float]:
    # The rate is so high that the first step is the best.
    made = trainer(name, learning_rate=0.3, **BEST)
    made.train()
    return [*numbers(made), float(made.state.best_global_step), made.evaluate()["eval_loss"]]


def saved_model(name: str) -> list[float]:
    made = trainer(name)
    made.train()
    made.save_model(str(FOLDER / name / "model"))
    made.accelerator.wait_for_everyone()
    from safetensors.torch import load_file

    saved = load_file(FOLDER / name / "model" / "model.safetensors")
    return [float(saved[key].double().abs().sum()) for key in sorted(saved)]


def resumed(name: str, **others: Any) -> list[float]:
    run(name, max_steps=4, save_strategy="steps", save_steps=2, **others)
    resume = str(FOLDER / name / "checkpoint-2")
    return run(name, max_steps=4, save_strategy="steps", save_steps=2, resume=resume, **others)


def limited_saves(name: str) -> list[float]:
    run(name, save_strategy="steps", save_steps=1, save_total_limit=1)
    return [float(path.name.split("-")[1]) for path in (FOLDER / name).glob("checkpoint-*")]


def generation(name: str) -> list[float]:
    writes = Write()
    return run(name, with_callbacks=[writes]) + writes.written


def two_trainers(name: str) -> list[float]:
    first = trainer(name)
    first.train()
    net = first.model
    return numbers(first) + run(name, lambda: net)


def second_run(name: str) -> list[float]:
    made = trainer(name)
    made.train()
    made.train()
    return numbers(made)


SGD = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.5})}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1}
RUNS: dict[str, Callable[[str], list[float]]] = {
    "plain": run,
    "accumulation": lambda name: run(name, gradient_accumulation_steps=2),
    "partial_accumulation": lambda name: run(
        name, gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=2
    ),
    "checkpointing": lambda name: run(name, gradient_checkpointing=True),
    "label_smoothing": lambda name: run(name, label_smoothing_factor=0.1),
    "neftune": lambda name: run(name, neftune_noise_alpha=5.0),
    "small_clipping": lambda name: run(name, max_grad_norm=1e-3),
    "no_clipping": lambda name: run(name, max_grad_norm=0.0),
    "weight_decay": lambda name: run(name, weight_decay=0.5),
    "adafactor": lambda name: run(name, optim="adafactor"),
    "sgd": lambda name: run(name, optim="sgd", optim_args="momentum=0.9"),
    "cosine": lambda name: run(name, lr_scheduler_type="cosine", warmup_steps=1),
    "plateau": lambda name: run(name, lr_scheduler_type="reduce_lr_on_plateau", **EVALUATES),
    "optimizers": optimizers,
    "optimizer_class": lambda name: run(name, **{f"with_{key}": SGD[key] for key in SGD}),
    "own_optimizer": lambda name: run(name, kind=OwnOptimizer),
    "rates_by_layer": lambda name: run(name, kind=RatesByLayer),
    "evaluation": lambda name: run(name, with_compute_metrics=right, **EVALUATES),
    "evaluation_at_start": lambda name: run(name, eval_on_start=True, **EVALUATES),
    "evaluation_before": evaluation_before,
    "preprocessed_logits": lambda name: run(
        name,
        with_compute_metrics=right,
        with_preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        **EVALUATES,
    ),
    "prediction": prediction,
    "early_stopping": early_stopping,
    "best_model": best_model,
    "saved_model": saved_model,
    "resumed": resumed,
    "resumed_stream": lambda name: resumed(name, data=Stream()),
    "limited_saves": limited_saves,
    "stream": lambda name: run(name, data=Stream()),
    "dropped_last": lambda name: run(name, data=Tokens(15), dataloader_drop_last=True),
    "own_loss": lambda name: run(name, kind=OwnLoss),
    "loss_function": lambda name: run(name, with_compute_loss_func=mean_loss),
    "frozen_layers": lambda name: run(name, first_layer_frozen),
    "tied": lambda name: run(name, lambda: model(tie_word_embeddings=True)),
    "resized": lambda name: run(name, resized),
    "classification": lambda name: run(
        name,
        lambda: LlamaForSequenceClassification.from_pretrained(CLASSIFIER),
        data=Tokens(16, labels=3),
    ),
    "lora": lambda name: run(name, adapted),
    "dora": lambda name: run(name, lambda: adapted(use_dora=True)),
    "rate_of_callback": lambda name: run(name, with_callbacks=[SetRate()]),
    "stop_of_callback": lambda name: run(name, with_callbacks=[Stop()]),
    "generation": generation,
    "counted_tokens": lambda name: run(name, include_num_input_tokens_seen="all"),
    "averaged_tokens": lambda name: run(name, average_tokens_across_devices=True),
    "smaller_batches": lambda name: run(name, auto_find_batch_size=True),
    "two_trainers": two_trainers,
    "second_run": second_run,
}


def main() -> None:
    found: dict[str, Any] = {}
    # Before there are arguments: transformers draws other values for a model that it shards.
    # The ranks meet in the first training, long before they load it.
    if os.environ["RANK"] == "0":
        model(LlamaForSequenceClassification, num_labels=3).save_pretrained(CLASSIFIER)
    for name in FEATURES:
        try:
            found[name] = RUNS[name](name)
        except (ValueError, RuntimeError, AttributeError, TypeError, KeyError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        print(name, flush=True)
    (FOLDER / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
