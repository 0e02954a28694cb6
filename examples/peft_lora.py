r"""PEFT's LoRA with the Trainer: the base model is sharded. Only the adapter is trained and saved.

    python -m zero run torchrun --nproc_per_node 2 examples/peft_lora.py \
        --deepspeed configs/ds_config_zero3.json

A tiny untrained Llama with an adapter learns to write a sequence twice.
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.hf_argparser import DataClassType

BASE = LlamaConfig(
    vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
)  # fmt: skip


class Twice(Dataset):
    """512 random sequences of 6 tokens, each written twice. Only the second copy has labels."""

    def __init__(self) -> None:
        self.first = torch.randint(2, 32, (512, 6), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first = self.first[index]
        labels = torch.cat([torch.full_like(first, -100), first])
        return {"input_ids": torch.cat([first, first]), "labels": labels}


def main() -> None:
    defaults = [
        "--output_dir",
        "output/peft_lora",
        "--learning_rate",
        "5e-3",
        "--report_to",
        "none",
    ]
    (args,) = HfArgumentParser(DataClassType(TrainingArguments)).parse_args_into_dataclasses(
        [*defaults, *sys.argv[1:]]
    )
    set_seed(args.seed)
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = Trainer(get_peft_model(LlamaForCausalLM(BASE), lora), args, train_dataset=Twice())
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # only the adapter


if __name__ == "__main__":
    main()
