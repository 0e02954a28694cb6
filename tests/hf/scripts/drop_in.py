"""What users of DeepSpeed do with the Trainer, one after another on two ranks.

Prints on each rank a line of what happened.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import zero
from zero.core.param_group import owning_group

PART = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
TEXT = PART | {"vocab_size": 64, "max_position_embeddings": 16}
IMAGE = PART | {"image_size": 28, "patch_size": 14}
TOKENS = TEXT | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Tokens(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 60, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def arguments(stage: int) -> TrainingArguments:
    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"}
    return TrainingArguments(
        sys.argv[1], max_steps=2, per_device_train_batch_size=2, learning_rate=0.1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, deepspeed=config,
    )  # fmt: skip


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TEXT, use_cache=False))


def build(kind: Callable[[Any], torch.nn.Module], config: Any) -> str:
    """The ranks' values of the sharded parameters of a model that its class builds at stage 3."""
    torch.manual_seed(0)
    kept, model = arguments(3), kind(config)  # the configuration holds while the arguments live
    params = [param for param in model.parameters() if owning_group(param) is not None]
    with zero.GatheredParameters(params):
        total = sum(param.double().abs().sum().item() for param in params)
        spread = min(param.std().item() for param in params if param.dim() > 1)
    assert kept is not None
    return f"{len(params) > 0} {spread > 1e-3} {total!r}"


def train_twice(stage: int) -> str:
    trainer = Trainer(llama(), arguments(stage), train_dataset=Tokens())
    trainer.train()
    try:
        trainer.train()
    except ValueError as error:
        Trainer(trainer.model, arguments(stage), train_dataset=Tokens()).train()
        return str(error)
    return "trained"


def own_optimizer() -> str:
    model = llama()
    mine = torch.optim.SGD(model.parameters(), lr=1e-3)
    try:
        Trainer(model, arguments(2), train_dataset=Tokens(), optimizers=(mine, None)).train()
    except ValueError as error:
        return str(error)
    return "dropped"


class OwnTrainer(Trainer):
    def create_optimizer(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.5)
        return self.optimizer


def own_method() -> str:
    trainer = OwnTrainer(llama(), arguments(2), train_dataset=Tokens())
    trainer.train()
    return f"{trainer.optimizer.param_groups[0]['momentum']}"


def main() -> None:
    vision = CLIPConfig(vision_config=IMAGE).vision_config
    llava = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**TEXT))
    cases = {
        "clip": lambda: build(CLIPModel, CLIPConfig(text_config=TOKENS, vision_config=IMAGE)),
        "llava": lambda: build(LlavaForConditionalGeneration, llava),
        "twice 2": lambda: train_twice(2),
        "twice 3": lambda: train_twice(3),
        "optimizers": own_optimizer,
        "create_optimizer": own_method,
    }
    for name, case in cases.items():
        print(f"{name}|{os.environ['RANK']}|{case()}", flush=True)


if __name__ == "__main__":
    main()
