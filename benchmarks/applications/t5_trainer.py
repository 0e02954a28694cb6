"""A Trainer script as a third party would write it. It imports nothing of this project.

It trains a small T5 from scratch to repeat its input. `benchmarks.compatibility.deepspeed_losses`
runs it unchanged with DeepSpeed (plain torchrun) and with this engine (`torchrun -m zero run`). The
curve is in `trainer_state.json` in the output folder."""

import torch
from torch.utils.data import Dataset
from transformers import (
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

VOCABULARY = 128


class Echo(Dataset):
    """Random sequences of 4 to 12 tokens, which end with 1. The labels are the input."""

    def __init__(self, size: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 13, (size,), generator=generator).tolist()
        self.rows = [
            [*torch.randint(2, VOCABULARY, (length,), generator=generator).tolist(), 1]
            for length in lengths
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad to the longest row: ids with 0, labels with -100."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows]
    labels = [row["labels"] + [-100] * (width - len(row["labels"])) for row in rows]
    input_ids = torch.tensor(ids)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != 0).long(),
        "labels": torch.tensor(labels),
    }


def main() -> None:
    (args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    config = T5Config(
        d_model=64,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        d_kv=16,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    data = Echo(800, seed=5)
    trainer = Seq2SeqTrainer(
        model=model, args=args, train_dataset=data, eval_dataset=Echo(64, 6), data_collator=collate
    )
    trainer.train()
    trainer.evaluate()
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(
            "engine:", type(trainer.model_wrapped).__module__, type(trainer.model_wrapped).__name__
        )


if __name__ == "__main__":
    main()
