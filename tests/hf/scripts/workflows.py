"""Workflows with a Trainer beyond one training. An ordinary transformers script, which does not
mention zero.

`python workflows.py FOLDER` runs them one after another, and fails where one differs from plain
torch.

Each workflow is a generator with a folder of its own, which has the same path on all ranks. It
first does what needs no sharding, such as the reference in plain torch. What comes after its
`yield` runs when all references are done: once training arguments exist, transformers builds every
model sharded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from deepspeed import zero
from jobs import Tokens, collate, make_model
from packaging.version import Version
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTModel,
    set_seed,
)

from tests.hf.trainer_runs import AUTO

ZERO3: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    **AUTO,
}


def arguments(folder: Path, **others: Any) -> TrainingArguments:
    settings = {
        "output_dir": str(folder), "deepspeed": ZERO3, "max_steps": 3, "logging_steps": 1,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(**settings | others)


def trained(model: torch.nn.Module, args: TrainingArguments) -> Trainer:
    trainer = Trainer(model, args, train_dataset=Tokens(8, seq2seq=False), data_collator=collate)
    trainer.train()
    return trainer


def private(folder: Path) -> Path:
    """Return a folder of this rank alone, so that no rank waits for another's files."""
    return folder / f"rank{os.environ['RANK']}"


# -- the workflows


def batch_size_is_found(folder: Path) -> Iterator[None]:
    """At stage 2: transformers itself refuses `auto_find_batch_size` at stage 3."""

    def too_large(module: torch.nn.Module, args: tuple) -> None:
        if args[0].shape[0] > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate too much")

    yield
    model = make_model("llama")
    model.model.layers[1].register_forward_pre_hook(too_large)
    config = ZERO3 | {"zero_optimization": {"stage": 2}}
    trainer = trained(model, arguments(folder, deepspeed=config, auto_find_batch_size=True))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.state.train_batch_size == 2 and losses[0] > losses[-1]


def random_numbers(folder: Path) -> Iterator[None]:
    """The random state after a ViT, whose constructor draws, was loaded."""
    path = private(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    ViTModel(ViTConfig(num_hidden_layers=1, image_size=16, **sizes)).save_pretrained(path)

    def number() -> float:
        set_seed(2)
        ViTModel.from_pretrained(path)
        return torch.rand(()).item()

    plain = number()
    yield
    args = arguments(folder)
    assert args.hf_deepspeed_config.is_zero3() and number() == plain


def saved(kind: type[PreTrainedModel], config: PretrainedConfig, folder: Path) -> Iterator[None]:
    """A model in many files, whose weights may have other names there than in its modules."""
    path = private(folder)
    kind(config).save_pretrained(path, max_shard_size="20KB")
    assert len([*path.glob("*.safetensors")]) > 2
    kind.from_pretrained(path).save_pretrained(path / "plain")
    expected = load_file(path / "plain" / "model.safetensors")
    yield
    args = arguments(folder, learning_rate=0.0, max_steps=1)
    trainer = trained(kind.from_pretrained(path), args)
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        found = load_file(folder / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def built(kind: type[PreTrainedModel], config: PretrainedConfig, folder: Path) -> Iterator[None]:
    """A model of models that its class builds: those inside are sharded, and then drawn."""
    yield
    args = arguments(folder)  # must stay alive while the model is built
    assert args.hf_deepspeed_config.is_zero3()
    params = [each for each in kind(config).parameters() if hasattr(each, "ds_tensor")]
    matrices = [param for param in params if param.dim() > 1]
    with zero.GatheredParameters(matrices):
        assert len(matrices) > 10 and min(each.std().item() for each in matrices) > 1e-3


SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
NAMED = {
    "bert": (BertForMaskedLM, BertConfig(vocab_size=64, **SMALL)),
    "llava": (
        LlavaForConditionalGeneration,
        LlavaConfig(
            vision_config=CLIPVisionConfig(image_size=16, patch_size=8, **SMALL),
            text_config=LlamaConfig(vocab_size=64, **SMALL),
            image_token_index=63,
        ),
    ),
}


TEXT = SMALL | {"vocab_size": 64, "eos_token_id": 2}
IMAGE = SMALL | {"image_size": 16, "patch_size": 8}
WORKFLOWS: dict[str, Callable[[Path], Iterator[None]]] = {
    "batch_size_is_found": batch_size_is_found,
    "saved_llama": partial(saved, LlamaForCausalLM, LlamaConfig(vocab_size=64, **SMALL)),
    "random_numbers": random_numbers,
    "built_clip": partial(built, CLIPModel, CLIPConfig(text_config=TEXT, vision_config=IMAGE)),
    "built_llava": partial(built, *NAMED["llava"]),
}
# Earlier releases name the weights of these models otherwise.
if Version(transformers.__version__) >= Version("5.23"):
    WORKFLOWS |= {f"saved_{name}": partial(saved, *model) for name, model in NAMED.items()}


def main() -> None:
    folder = Path(sys.argv[1])
    workflows = [workflow(folder / name) for name, workflow in WORKFLOWS.items()]
    for _ in range(2):
        for workflow in workflows:
            next(workflow, None)


if __name__ == "__main__":
    main()
