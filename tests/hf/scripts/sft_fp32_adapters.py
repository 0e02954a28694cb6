"""TRL's `sft` script, with adapters in fp32: TRL makes those of a quantized model bf16, and AdamW
then rounds the weights of DDP in each step, so that nothing can be compared exactly."""

from __future__ import annotations

from typing import Any

from datasets import load_dataset
from trl import (
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    SFTTrainer,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)


class Fp32Adapters(SFTTrainer):
    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        for param in self.model.parameters():
            if param.requires_grad:
                param.data = param.data.float()


if __name__ == "__main__":
    script, args, model = TrlParser(
        (ScriptArguments, SFTConfig, ModelConfig)
    ).parse_args_and_config()
    args.model_init_kwargs = {"dtype": model.dtype}
    trainer = Fp32Adapters(
        model=model.model_name_or_path,
        args=args,
        train_dataset=load_dataset(script.dataset_name)["train"],
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(args.output_dir)
