"""Data, models, Trainers, metrics and callbacks of `features.py`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    StoppingCriteria,
    Trainer,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_callback import ExportableState

SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 40, "max_position_embeddings": 16, "use_cache": False,
}  # fmt: skip

# -- data


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


class Named(Tokens):
    """Labels by another name, and a column that the model does not take."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = super().__getitem__(index)["input_ids"]
        return {"input_ids": ids, "targets": ids, "number": index}


class Lengths(Tokens):
    """Samples of different lengths."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):  # the sampler asks for all
            raise IndexError
        ids = super().__getitem__(index)["input_ids"]
        return {"input_ids": ids[: 3 + index % 6], "labels": ids[: 3 + index % 6]}


class Pictures(Tokens):
    """Every third sample has a picture."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = super().__getitem__(index)
        if index % 3 == 0:
            found["pixels"] = torch.full((4, 16), index / 16)
        return found


def with_images(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch, in which there are pictures only if a sample has one."""
    batch = {key: torch.stack([each[key] for each in samples]) for key in ("input_ids", "labels")}
    pictures = [each["pixels"] for each in samples if "pixels" in each]
    return batch | ({"pixels": torch.stack(pictures)} if pictures else {})


def with_blank_images(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The same with a blank picture where no sample has one."""
    batch = with_images(samples)
    return {"pixels": torch.zeros(1, 4, 16)} | batch


# -- models


def model(kind: type = LlamaForCausalLM, **others: Any) -> Any:
    set_seed(1)
    return kind(LlamaConfig(**SIZES | {"pad_token_id": 0, "tie_word_embeddings": False} | others))


def first_layer_frozen() -> Any:
    net = model()
    net.model.embed_tokens.requires_grad_(False)
    net.model.layers[0].requires_grad_(False)
    return net


def resized() -> Any:
    net = model()
    net.resize_token_embeddings(46)
    net.resize_token_embeddings(44)
    set_seed(3)
    return net


def skips_layers() -> Any:
    set_seed(1)
    return OPTForCausalLM(
        OPTConfig(
            hidden_size=16, ffn_dim=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=40,
            word_embed_proj_dim=16, max_position_embeddings=16, layerdrop=0.5, dropout=0.0,
            use_cache=False,
        )
    )  # fmt: skip


def with_peft(config: Any) -> Any:
    net = model()
    set_seed(4)
    return get_peft_model(net, config)


def adapted(**others: Any) -> Any:
    targets = ["q_proj", "v_proj"]
    return with_peft(LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **others))


def adalora() -> Any:
    return with_peft(
        AdaLoraConfig(
            init_r=4, target_r=2, tinit=1, tfinal=1, deltaT=1, total_step=6,
            target_modules=["q_proj"], task_type="CAUSAL_LM",
        )
    )  # fmt: skip


def prompts() -> Any:
    return with_peft(PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))


def scaled() -> Any:
    return with_peft(
        IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"],
            task_type="CAUSAL_LM",
        )
    )  # fmt: skip


class Sees(torch.nn.Module):
    """A language model that adds the mean of what it sees to what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.eye = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())
        self.language = model()

    def forward(self, input_ids: Any, labels: Any, pixels: Any = None) -> Any:
        embedded = self.language.get_input_embeddings()(input_ids)
        if pixels is not None:
            embedded = embedded + self.eye(pixels).mean((0, 1))
        return self.language(inputs_embeds=embedded, labels=labels)


def sees() -> Any:
    set_seed(1)
    return Sees()


# -- Trainers and losses


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
        return mean_loss(model(**inputs), labels)


def mean_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


class NamedLoss(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        outputs = model(inputs["input_ids"])
        loss = mean_loss(outputs, inputs["targets"]) + 0.01 * inputs["number"].float().mean()
        return (loss, outputs) if return_outputs else loss


class NotANumber(Trainer):
    """The second loss is NaN, which the log leaves out; the gradient is zero."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self.state.global_step == 1 and model.training:
            loss = 0.0 * loss + (loss.detach() + float("nan"))
        return loss


# -- metrics


def right(prediction: Any) -> dict[str, float]:
    found = prediction.predictions
    found = found if found.ndim == 2 else found.argmax(-1)
    return {"right": float((found == prediction.label_ids).mean())}


class BatchMetrics:
    """The rate of right tokens, counted batch by batch."""

    def __init__(self) -> None:
        self.right = self.seen = 0

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        found = prediction.predictions.argmax(-1) == prediction.label_ids
        self.right += int(found.sum())
        self.seen += found.numel()
        return {"right": self.right / self.seen} if compute_result else {}


def seen_by_metrics(prediction: Any) -> dict[str, float]:
    return {"right": float(prediction.inputs.sum() + prediction.losses.sum())}


# -- callbacks


class SetRate(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for group in kwargs["optimizer"].param_groups:
            group["lr"] = 1e-2 / (1 + state.global_step)


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


class Freeze(TrainerCallback):
    """Trains the first layer in steps with an odd number, or from the second step on."""

    def __init__(self, alternates: bool):
        self.alternates = alternates

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trains = state.global_step % 2 == 1 if self.alternates else state.global_step >= 1
        for param in kwargs["model"].model.layers[0].parameters():
            param.requires_grad_(trains)


class Allocate(TrainerCallback):
    """What PEFT's guide says of AdaLoRA."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].base_model.update_and_allocate(state.global_step + 1)


class SeedByRank(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.manual_seed(args.process_index)


class StopByRank(StoppingCriteria):
    """Ends the sequences of rank 0 after two tokens and those of rank 1 after four."""

    def __init__(self, rank: int):
        self.length = 3 + 2 * rank

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Counted(TrainerCallback, ExportableState):
    """Counts steps, also across a resume."""

    def __init__(self, steps: int = 0):
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


class Losses(TrainerCallback):
    """Keeps the losses of all runs of a Trainer."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        self.seen += [logs[key] for key in ("loss", "learning_rate", "eval_loss") if key in logs]


# -- a stub of optuna, which may not be installed: what transformers uses of it


class Trial:
    def __init__(self, params: dict[str, float], number: int):
        self.params, self.number = params, number

    def suggest_float(self, name: str, low: float, high: float) -> float:
        self.params[name] = low + (high - low) / (1 + self.number)
        return self.params[name]


class Study:
    def optimize(self, objective: Any, n_trials: int, **kwargs: Any) -> None:
        trials = [Trial({}, number) for number in range(n_trials)]
        values = [objective(trial) for trial in trials]
        best = values.index(min(values))
        params = trials[best].params
        self.best_trial = SimpleNamespace(number=best, value=values[best], params=params)

    def _is_multi_objective(self) -> bool:
        return False


def stub_of_optuna() -> ModuleType:
    optuna: Any = ModuleType("optuna")
    optuna.__spec__ = ModuleSpec("optuna", None)
    optuna.Trial, optuna.create_study = Trial, lambda **kwargs: Study()
    optuna.trial = SimpleNamespace(BaseTrial=Trial, FixedTrial=Trial)
    return optuna
