"""Supervised fine-tuning by TRL at ZeRO stage 3: an ordinary TRL script, without any mention of
zero.

    torchrun --nproc_per_node 2 -m zero run examples/trl_sft.py
    torchrun --nproc_per_node 2 -m zero run examples/trl_sft.py --lora --output output/trl_sft_lora

A small new Qwen2 with bytes as tokens learns to add: prompt "3+4=", completion "7". With `--lora`
the model is frozen and adapters are trained. Everything is made here, nothing is downloaded. Needs
`pip install trl==1.16.0 peft`."""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import ByT5Tokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

PAD, EOS = 0, 1  # of ByT5's tokenizer
CONFIG = Path(__file__).resolve().parent.parent / "configs" / "ds_config_zero3.json"


def sums() -> Dataset:
    """Every sum of two digits."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    return Dataset.from_list([{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in pairs])


def make_model(tokenizer: ByT5Tokenizer) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=None,
        eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lora", action="store_true", help="freeze the model and train adapters")
    parser.add_argument("--output", default="output/trl_sft")
    options = parser.parse_args()

    # Arguments before the model: they tell transformers to build it sharded.
    args = SFTConfig(
        options.output, deepspeed=str(CONFIG), max_steps=options.steps,
        per_device_train_batch_size=8, bf16=False,
        learning_rate=5e-3, logging_steps=10, eval_strategy="steps", eval_steps=50,
        save_steps=50, report_to="none", disable_tqdm=True, max_length=32,
    )  # fmt: skip
    tokenizer = ByT5Tokenizer(extra_ids=0)
    trainer = SFTTrainer(
        make_model(tokenizer),
        args,
        train_dataset=sums(),
        eval_dataset=sums(),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear") if options.lora else None,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
