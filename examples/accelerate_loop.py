r"""A plain `accelerate` loop: accumulation, evaluation, checkpoints, the finished model.

    torchrun --nproc_per_node 2 examples/accelerate_loop.py
    torchrun --nproc_per_node 2 examples/accelerate_loop.py --epochs 8 \
        --resume output/accelerate_loop/epoch_4

A tiny T5 learns to repeat its input. Everything is made here, nothing is downloaded.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # for a checkout that is not installed
from zero.hf import enable

enable()  # before accelerate and transformers are imported

# ruff: noqa: E402
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader, Dataset
from transformers import T5Config, T5ForConditionalGeneration

SYMBOLS, LENGTH, ROWS = 32, 6, 16


class Copies(Dataset):
    """`size` random sequences. The target of each is the sequence itself."""

    def __init__(self, size: int, seed: int):
        self.ids = torch.randint(
            2, SYMBOLS, (size, LENGTH), generator=torch.Generator().manual_seed(seed)
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@torch.no_grad()
def accuracy(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    model.eval()
    right, count = 0, 0
    for batch in loader:
        predicted = model(**batch).logits.argmax(-1)
        predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
        right += int((predicted == labels).sum())
        count += labels.numel()
    model.train()
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--size", type=int, default=3200, help="sequences in an epoch")
    parser.add_argument("--output", type=Path, default=Path("output/accelerate_loop"))
    parser.add_argument("--resume", type=Path, help="a folder epoch_N to resume from")
    args = parser.parse_args()

    plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0, zero3_save_16bit_model=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=plugin)
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=SYMBOLS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, pad_token_id=0
    )
    config.decoder_start_token_id = config.pad_token_id
    model = T5ForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    training, held_out = DataLoader(Copies(args.size, 1), ROWS), DataLoader(Copies(100, 2), ROWS)
    model, optimizer, training, held_out = accelerator.prepare(model, optimizer, training, held_out)

    done = 0
    if args.resume:
        accelerator.load_state(args.resume)
        done = int(args.resume.name.removeprefix("epoch_"))
    for epoch in range(done + 1, args.epochs + 1):
        for batch in training:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        mean = torch.as_tensor(accelerator.reduce(loss.detach(), "mean")).item()
        accelerator.print(
            f"epoch {epoch}: loss {mean:.6f}, accuracy {accuracy(accelerator, model, held_out):.3f}"
        )
        accelerator.save_state(args.output / f"epoch_{epoch}")

    weights = accelerator.get_state_dict(model)  # whole on the main process
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output / "model", state_dict=weights)
    accelerator.end_training()


if __name__ == "__main__":
    main()
