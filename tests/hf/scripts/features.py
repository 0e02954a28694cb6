"""What the Trainer can do, one after another. An ordinary transformers script.

`python features.py FOLDER [DEEPSPEED.json [NAME]]`: each rank writes FOLDER/rankN.json, which has
by function the losses and the other numbers that it gave, or the words of its error. Names and
order are those of `tests.hf.features`. One that ends the job runs only if it is named."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    EarlyStoppingCallback,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StoppingCriteriaList,
    Trainer,
    TrainerCallback,
    set_seed,
)

from tests.hf.features import BEST, EVALUATES, FEATURES
from tests.hf.scripts import feature_parts as parts
from tests.hf.scripts.jobs import collate, make_model

FOLDER = Path(sys.argv[1])
DEEPSPEED = sys.argv[2] if len(sys.argv) > 2 else None
CLASSIFIER = FOLDER / "classifier"


def arguments(name: str, **others: Any) -> Seq2SeqTrainingArguments:
    settings: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "use_cpu": True, "seed": 5, "lr_scheduler_type": "constant",
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return Seq2SeqTrainingArguments(str(FOLDER / name), deepspeed=DEEPSPEED, **settings | others)


def trainer(
    name: str, net: Any = None, kind: type = Trainer, data: Any = None, **others: Any
) -> Any:
    """A Trainer. `others` beginning with `with_` are its own arguments, the rest those of
    `TrainingArguments`.
    """
    own = {key[5:]: each for key, each in others.items() if key.startswith("with_")}
    given = {key: each for key, each in others.items() if not key.startswith("with_")}
    args = arguments(name, **given)  # first: it decides how models are built
    if "model_init" not in own:
        own["model"] = net() if net is not None else parts.model()
    set_seed(2)
    data = parts.Tokens() if data is None else data
    return kind(args=args, train_dataset=data, **{"eval_dataset": parts.Tokens(8)} | own)


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


# -- what is not one argument


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


def optimizers(name: str) -> list[float]:
    def own(made: Any) -> tuple[torch.optim.Optimizer, None]:
        return torch.optim.SGD(made.parameters(), lr=0.5), None

    args, net = arguments(name), parts.model()
    made = Trainer(net, args, train_dataset=parts.Tokens(), optimizers=own(net))
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
    found = made.predict(parts.Tokens(6))
    return [*numbers(made), found.metrics["test_loss"], float(abs(found.predictions).sum())]


def early_stopping(name: str) -> list[float]:
    stops = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=100.0)
    return run(name, max_steps=8, with_callbacks=[stops], **BEST)


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


def gathered(net: Any) -> Any:
    """Context in which the weights can be read."""
    if DEEPSPEED is None:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(net.parameters()))


class Average(TrainerCallback):
    """Keeps torch's moving average of the weights."""

    def __init__(self, gathers: bool):
        self.gathers = gathers

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        decay = get_ema_multi_avg_fn(0.5)
        self.averaged = AveragedModel(kwargs["model"], multi_avg_fn=decay)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with gathered(kwargs["model"]) if self.gathers else nullcontext():
            self.averaged.update_parameters(kwargs["model"])


def averaged_model(name: str, gathers: bool = True) -> list[float]:
    average = Average(gathers)
    found = run(name, with_callbacks=[average])
    weights = average.averaged.module.parameters()
    return found + [float(each.detach().double().abs().sum()) for each in weights]


def restored_callback(name: str) -> list[float]:
    saves: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run(name, with_callbacks=[parts.Counted()], **saves)
    saves["restore_callback_states_from_checkpoint"] = True
    made = trainer(name, with_callbacks=[parts.Counted()], **saves)
    made.train(resume_from_checkpoint=str(FOLDER / name / "checkpoint-2"))
    counted = [each for each in made.callback_handler.callbacks if isinstance(each, parts.Counted)]
    return [*numbers(made), *(float(each.steps) for each in counted)]


def search(name: str) -> list[float]:
    sys.modules["optuna"] = parts.stub_of_optuna()
    logs = parts.Losses()
    made = trainer(name, with_model_init=lambda: parts.model(), with_callbacks=[logs])
    made.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
        n_trials=2,
        backend="optuna",
    )
    return logs.seen


def bf16_evaluation(name: str) -> list[float]:
    made = trainer(name, bf16_full_eval=True)
    made.train()
    return [*numbers(made), made.evaluate()["eval_loss"]]


def several_evaluations(name: str) -> list[float]:
    data = {"first": parts.Tokens(8), "second": parts.Tokens(6)}
    made = trainer(name, with_eval_dataset=data, **EVALUATES)
    made.train()
    log = made.state.log_history
    return [entry[key] for entry in log for key in entry if key.endswith("_loss")]


def named_labels(name: str, **given: Any) -> list[float]:
    data = {"data": parts.Named(), "with_eval_dataset": parts.Named(8)}
    made = trainer(name, kind=parts.NamedLoss, label_names=["targets"], **data, **given)
    made.train()
    found = made.predict(parts.Named(6))
    return [*numbers(made), found.metrics["test_loss"], float(found.label_ids.sum())]


def only_model(name: str) -> list[float]:
    saves = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True, "max_steps": 4}
    found = run(name, **saves)
    saved = FOLDER / name / "checkpoint-2"
    states = [path for path in saved.iterdir() if path.name.startswith(("optim", "global_step"))]
    net = LlamaForCausalLM.from_pretrained(saved)
    return [*found, *run(name, lambda: net), float(len(states))]


def written(name: str, trains: bool = True) -> list[float]:
    def metrics(prediction: Any) -> dict[str, float]:
        return {"right": float(abs(prediction.predictions).sum())}

    generates = {"predict_with_generate": True, "generation_max_length": 6} | EVALUATES
    made = trainer(
        name, partial(make_model, "t5"), Seq2SeqTrainer, with_compute_metrics=metrics, **generates
    )
    if trains:
        made.train()
    else:
        made.evaluate()
    stops = StoppingCriteriaList([parts.StopByRank(made.args.process_index)])
    found = made.predict(parts.Tokens(7), stopping_criteria=stops, min_new_tokens=5)
    return numbers(made) + found.predictions.flatten().tolist()


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


def images(name: str, collate: Any = parts.with_blank_images) -> list[float]:
    own = {"data": parts.Pictures(), "with_data_collator": collate}
    return run(name, parts.sees, remove_unused_columns=False, **own)


SGD = (torch.optim.SGD, {"lr": 0.5, "momentum": 0.5})
# For DDP: parameters without a gradient in some steps.
UNUSED = {"ddp_find_unused_parameters": True}
RUNS: dict[str, Callable[..., list[float]]] = {
    "optimizers": optimizers,
    "optimizer_class": lambda name: run(name, with_optimizer_cls_and_kwargs=SGD),
    "own_optimizer": lambda name: run(name, kind=parts.OwnOptimizer),
    "rates_by_layer": lambda name: run(name, kind=parts.RatesByLayer),
    "evaluation": partial(run, with_compute_metrics=parts.right),
    "evaluation_before": evaluation_before,
    "preprocessed_logits": partial(
        run,
        with_compute_metrics=parts.right,
        with_preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    ),
    "prediction": prediction,
    "early_stopping": early_stopping,
    "best_model": best_model,
    "saved_model": saved_model,
    "resumed": resumed,
    "resumed_stream": lambda name: resumed(name, data=parts.Stream()),
    "limited_saves": limited_saves,
    "stream": lambda name: run(name, data=parts.Stream()),
    "dropped_last": lambda name: run(name, data=parts.Tokens(15), dataloader_drop_last=True),
    "own_loss": lambda name: run(name, kind=parts.OwnLoss),
    "loss_function": lambda name: run(name, with_compute_loss_func=parts.mean_loss),
    "frozen_layers": lambda name: run(name, parts.first_layer_frozen),
    "tied": lambda name: run(name, lambda: parts.model(tie_word_embeddings=True)),
    "resized": lambda name: run(name, parts.resized),
    "classification": lambda name: run(
        name,
        lambda: LlamaForSequenceClassification.from_pretrained(CLASSIFIER),
        data=parts.Tokens(16, labels=3),
    ),
    "lora": lambda name: run(name, parts.adapted),
    "dora": lambda name: run(name, lambda: parts.adapted(use_dora=True)),
    "rate_of_callback": lambda name: run(name, with_callbacks=[parts.SetRate()]),
    "stop_of_callback": lambda name: run(name, with_callbacks=[parts.Stop()]),
    "generation": generation,
    "two_trainers": two_trainers,
    "second_run": second_run,
    "model_init": lambda name: run(name, with_model_init=lambda: parts.model()),
    "search": search,
    "averaged_model": averaged_model,
    "averaged_alone": lambda name: averaged_model(name, gathers=False),
    "unfreezing": partial(
        run, net=parts.first_layer_frozen, with_callbacks=[parts.Freeze(alternates=False)]
    ),
    "alternating": lambda name: run(
        name, with_callbacks=[parts.Freeze(alternates=True)], max_steps=4, **UNUSED
    ),
    "adalora": lambda name: run(name, parts.adalora, max_steps=6),
    "allocating": lambda name: run(
        name, parts.adalora, with_callbacks=[parts.Allocate()], max_steps=6
    ),
    "prompts": lambda name: run(name, parts.prompts),
    "ia3": lambda name: run(name, parts.scaled),
    "experts": partial(run, net=partial(make_model, "mixtral")),
    "images": images,
    "images_on_one_rank": lambda name: images(name, parts.with_images),
    "layer_drop": lambda name: run(name, parts.skips_layers, max_steps=4, **UNUSED),
    "layer_drop_by_rank": lambda name: run(
        name, parts.skips_layers, with_callbacks=[parts.SeedByRank()]
    ),
    "encoder_decoder": partial(run, net=partial(make_model, "t5")),
    "predict_with_generate": written,
    "evaluated_alone": partial(written, trains=False),
    "restored_callback": restored_callback,
    "grouped": partial(run, data=parts.Lengths(), with_data_collator=collate),
    "named_labels": named_labels,
    "nan_filter": lambda name: run(name, kind=parts.NotANumber),
    "batch_metrics": partial(run, with_compute_metrics=parts.BatchMetrics()),
    "more_for_metrics": partial(run, with_compute_metrics=parts.seen_by_metrics),
    "accumulated_evaluation": partial(run, with_compute_metrics=parts.right),
    "several_evaluations": several_evaluations,
    "only_model": only_model,
    "data_not_skipped": lambda name: resumed(name, ignore_data_skip=True),
    "bf16_evaluation": bf16_evaluation,
}


def main() -> None:
    found: dict[str, Any] = {}
    # Before there are arguments: transformers draws other values for a parts.model that it shards.
    # The ranks meet in the first training, long before they load it.
    if os.environ["RANK"] == "0":
        parts.model(LlamaForSequenceClassification, num_labels=3).save_pretrained(CLASSIFIER)
    names = sys.argv[3:] or [name for name, feature in FEATURES.items() if not feature.ends]
    for name in names:
        try:
            found[name] = RUNS.get(name, run)(name, **FEATURES[name].arguments)
        except (ValueError, RuntimeError, AttributeError, TypeError, KeyError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        print(name, flush=True)
    (FOLDER / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
