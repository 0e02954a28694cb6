"""TRL's GOLD on what the student writes: the example of TRL's documentation, as a script."""

from __future__ import annotations

from datasets import load_dataset
from transformers import set_seed
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.experimental.gold import GOLDConfig, GOLDTrainer


def main() -> None:
    parser = TrlParser((ScriptArguments, GOLDConfig, ModelConfig))
    script, training, model = parser.parse_args_and_config()
    training.model_init_kwargs = {"dtype": model.dtype}
    data = load_dataset(script.dataset_name)
    trainer = GOLDTrainer(
        model=model.model_name_or_path,
        teacher_model=training.teacher_model_name_or_path,
        args=training,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        peft_config=get_peft_config(model),
    )
    # At stage 3 the trainer's `resize_token_embeddings` draws random numbers, which it does not
    # under DDP: see docs/compatibility.md.
    set_seed(training.seed)
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)


if __name__ == "__main__":
    main()
