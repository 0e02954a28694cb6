"""Lightning's `DeepSpeedStrategy`: fit, validate, save, resume, the finished model in one file.

    python -m zero run examples/lightning_fit.py
    python -m zero run examples/lightning_fit.py --epochs 4 --resume output/lightning/epoch=1.ckpt

Lightning starts the ranks by itself. A small network learns which of four numbers is the largest.
"""
# Lightning is no requirement of this repository, so a type checker may not find it.
# pyright: reportMissingImports=false

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STRATEGIES = {
    "deepspeed_stage_2": {"stage": 2},
    "deepspeed_stage_3": {"stage": 3},
    "deepspeed_stage_3_offload": {
        "stage": 3,
        "offload_optimizer": True,
        "offload_parameters": True,
    },
}


class DeepSpeedOnCpu(DeepSpeedStrategy):
    """`DeepSpeedStrategy` without the two checks by which Lightning allows only CUDA devices."""

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Largest(pl.LightningModule):
    def configure_model(self) -> None:  # at stage 3 no rank ever holds the whole model
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
            )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("valid", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.print(
            f"epoch {self.current_epoch}: train {metrics['train']:.7f}, valid "
            f"{metrics['valid']:.7f}"
        )

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def loader(rows: int, seed: int) -> DataLoader:
    numbers = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(numbers, numbers.argmax(1)), batch_size=16)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["ddp", *STRATEGIES], default="deepspeed_stage_3")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("output/lightning"))
    parser.add_argument("--resume", help="a checkpoint epoch=N.ckpt to resume from")
    args = parser.parse_args()

    strategy = args.strategy
    if not torch.cuda.is_available() and strategy in STRATEGIES:
        strategy = DeepSpeedOnCpu(**STRATEGIES[strategy])
    saving = ModelCheckpoint(args.output, filename="{epoch}", save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="auto", devices=args.devices, strategy=strategy, max_epochs=args.epochs,
        gradient_clip_val=0.5,
        callbacks=[saving], default_root_dir=args.output, logger=False, enable_progress_bar=False,
    )  # fmt: skip
    model = Largest()
    trainer.fit(model, loader(1024, 1), loader(128, 2), ckpt_path=args.resume)
    valid = trainer.validate(model, loader(128, 2), verbose=False)[0]["valid"]
    if trainer.is_global_zero and args.strategy != "ddp":
        convert_zero_checkpoint_to_fp32_state_dict(
            saving.best_model_path, args.output / "model.ckpt"
        )
        model = Largest.load_from_checkpoint(
            args.output / "model.ckpt", map_location="cpu", weights_only=False
        )
        with torch.no_grad():
            alone = [nn.functional.cross_entropy(model.net(x), y) for x, y in loader(128, 2)]
        print(
            f"validated {valid:.6f}; loaded from one file, in one process "
            f"{torch.stack(alone).mean():.6f}"
        )


if __name__ == "__main__":
    main()
