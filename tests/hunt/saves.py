"""Models whose saving is odd: each way of saving writes what plain torch has, by name and value, or
is refused with an error that names what cannot be saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PromptTuningConfig,
    TaskType,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlamaForSequenceClassification,
)

import zero
from tests.dist.training import ds_config
from tests.parity.models import VOCABULARY, build, small
from zero.checkpoint.models import consolidate
from zero.errors import UsageError

MAKERS: dict[str, Callable[[], nn.Module]] = {}
# A view of a shard has no values.
REFUSED = {("Transposes", 3)}


def maker(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MAKERS[make.__name__] = make
    return make


for name in "t5", "gpt2", "llama", "mixtral", "deepseek":
    MAKERS[name] = lambda name=name: build(name)

# -- transformers


@maker
def tied_llama() -> nn.Module:
    return adapted(None, tie_word_embeddings=True)


@maker
def bart() -> nn.Module:
    config = BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=16,
    )  # fmt: skip
    model = BartForConditionalGeneration(config)
    model.final_logits_bias.normal_()
    return model


def _bert(**options: Any) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, **options,
    )  # fmt: skip


@maker
def bert() -> nn.Module:
    return BertForMaskedLM(_bert())


@maker
def encoder_decoder() -> nn.Module:
    decoder = _bert(is_decoder=True, add_cross_attention=True)
    return EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(_bert(), decoder))


@maker
def reward_model() -> nn.Module:
    config = build("llama").config
    config.num_labels, config.pad_token_id = 1, 0
    return LlamaForSequenceClassification(config)


# -- PEFT


def adapted(*configs: Any, **options: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    model: Any = small("llama", **sizes, **options)
    for number, each in enumerate(configs):
        if each is not None and number == 0:
            model = get_peft_model(model, each)
        elif each is not None:
            model.add_adapter(f"other{number}", each)
    return model


TARGETS = ["q_proj", "v_proj"]
ADAPTERS: dict[str, Callable[[], nn.Module]] = {
    "lora": lambda: adapted(LoraConfig(r=2, target_modules=TARGETS)),
    "dora": lambda: adapted(LoraConfig(r=2, target_modules=TARGETS, use_dora=True)),
    "lora_bias": lambda: adapted(LoraConfig(r=2, target_modules=TARGETS, bias="all")),
    "lora_with_head": lambda: adapted(
        LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["lm_head"])
    ),
    "lora_with_embeddings": lambda: adapted(
        LoraConfig(r=2, target_modules=[*TARGETS, "embed_tokens"], modules_to_save=["norm"])
    ),
    "lora_with_tied_head": lambda: adapted(
        LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["lm_head"]),
        tie_word_embeddings=True,
    ),
    "lora_tokens": lambda: adapted(
        LoraConfig(r=2, target_modules=TARGETS, trainable_token_indices=[3, 5])
    ),
    "two_adapters": lambda: adapted(
        LoraConfig(r=2, target_modules=TARGETS), LoraConfig(r=3, target_modules=["o_proj"])
    ),
    "ia3": lambda: adapted(
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    ),
    "loha": lambda: adapted(LoHaConfig(r=2, target_modules=TARGETS)),
    "vera": lambda: adapted(VeraConfig(r=2, target_modules=["q_proj"])),
    "prompt": lambda: adapted(
        PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    ),
}
MAKERS.update(ADAPTERS)

# -- torch


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 6))
        self.register_buffer("mean", torch.arange(6.0))
        self.register_buffer("hidden", torch.arange(6.0), persistent=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.linear(x))) * self.scale + self.mean


MAKERS["Plain"] = Odd


@maker
class Renames(Odd):
    """Has other names in its state dict, as value heads do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        kept = super().state_dict(*args, **kwargs)
        return {name.replace("other.", "v_head."): value for name, value in kept.items()}


@maker
class LeavesOut(Odd):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        kept = super().state_dict(*args, **kwargs)
        return {name: value for name, value in kept.items() if not name.startswith("linear")}


@maker
class Hooked(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, kept: dict, prefix: str, metadata: dict) -> None:
        kept[prefix + "renamed"] = kept.pop(prefix + "other.weight")


@maker
class SavesTwice(Odd):
    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "again"] = self.scale if keep_vars else self.scale.detach()


@maker
class ExtraState(Odd):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}


@maker
class Transposes(Odd):
    """Saves a weight in another shape."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        kept = super().state_dict(*args, **kwargs)
        kept["linear.weight"] = kept["linear.weight"].t()
        return kept


@maker
def parametrized() -> nn.Module:
    model = Odd()
    parametrizations.weight_norm(model.linear)
    parametrizations.orthogonal(model.other)
    return model


@maker
def compiled() -> nn.Module:
    return torch.compile(Odd(), backend="eager")  # pyright: ignore[reportReturnType]


@maker
def averaged() -> nn.Module:
    return AveragedModel(Odd())


@maker
def frozen_half() -> nn.Module:
    model = Odd()
    model.linear.requires_grad_(False)
    return model


@maker
def tied() -> nn.Module:
    model = Odd()
    model.other.weight = model.linear.weight
    return model


# -- the ways


def made(name: str) -> Any:
    torch.manual_seed(5)
    return MAKERS[name]()


def saved(name: str, stage: int, folder: Path) -> Iterator[tuple[str, dict, dict]]:
    """Yield on rank 0 a way of saving, what plain torch saves, and what the engine has saved."""
    plain, model = made(name), made(name)
    trained = [param for param in model.parameters() if param.requires_grad]
    engine: Any
    engine, *_ = zero.initialize(
        model=model,
        config=ds_config(stage=stage, stage3_param_persistence_threshold=10),
        optimizer=torch.optim.SGD(trained, lr=0.1),
    )
    # As accelerate's get_state_dict does.
    whole = engine._zero3_consolidated_16bit_state_dict() if stage == 3 else model.state_dict()
    engine.save_16bit_model(folder / "16bit")
    engine.save_checkpoint(folder / "checkpoint")
    if engine.comm.rank == 0:
        expected = plain.state_dict()
        yield "state_dict", expected, whole
        yield "save_16bit_model", *_once(expected, files(folder / "16bit"))
        if hasattr(plain, "save_pretrained"):
            plain.save_pretrained(folder / "plain")
            model.save_pretrained(folder / "engine", state_dict=whole)
            yield "save_pretrained", files(folder / "plain"), files(folder / "engine")
        consolidate(folder / "checkpoint", folder / "consolidated")
        found = files(folder / "consolidated")
        if name in ADAPTERS:
            yield "consolidate", files(folder / "plain"), found
        else:
            yield "consolidate", *_once(expected, found)
    engine.destroy()


def _once(expected: dict[str, Any], found: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """Tensors of a state dict, with tied ones once, under the file's name, and those of a file."""
    tensors = {key: each for key, each in expected.items() if isinstance(each, torch.Tensor)}
    places = {(found[key].shape, each.data_ptr()) for key, each in tensors.items() if key in found}
    is_tied = {k for k, each in tensors.items() if (each.shape, each.data_ptr()) in places}
    return {k: each for k, each in tensors.items() if k in found or k not in is_tied}, found


def files(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in files of a folder, by the file's folder and name."""
    return {
        f"{path.parent.relative_to(folder)}/{key}".removeprefix("./"): value
        for path in folder.rglob("*.safetensors")
        for key, value in load_file(path).items()
    }


def difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """What differs, or an empty text."""
    if keys := expected.keys() ^ found.keys():
        return f"{sorted(keys)[:3]} are missing, or additional"
    for key, value in expected.items():
        if not isinstance(value, torch.Tensor):
            same = value == found[key]
        else:
            same = value.dtype == found[key].dtype and torch.equal(value, found[key])
        if not same:
            return f"{key} has other values"
    return ""


def judge(
    rank: int, world_size: int, folder: str, tasks: list[tuple[str, int]]
) -> list[tuple[str, str]]:
    """For each (name, stage) why it is refused, or else what differs."""
    warnings.simplefilter("ignore")
    verdicts = []
    for name, stage in tasks:
        refused, different = "", []
        try:
            for way, expected, found in saved(name, stage, Path(folder, f"{name}{stage}")):
                if what := difference(expected, found):
                    different.append(f"{name}, stage {stage}, {way}: {what}")
        except UsageError as error:
            refused = str(error)
        verdicts.append((refused, "; ".join(different)))
    return verdicts
