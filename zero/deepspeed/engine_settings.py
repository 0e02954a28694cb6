"""What an engine says of its own configuration and place, under the names that DeepSpeed's users know."""

from __future__ import annotations

import torch

from zero.comm import Communicator
from zero.config import Config


class EngineSettings:
    """Mixed into the engine, which sets `settings`, `comm`, `optimizer` and `scaler`."""

    settings: Config
    comm: Communicator

    @property
    def _config(self) -> Config:
        """The settings, by the name that scripts read them."""
        return self.settings

    @property
    def device(self) -> torch.device:
        """Where the engine computes, and expects its inputs."""
        return self.comm.device

    @property
    def local_rank(self) -> int:
        return self.comm.device.index or 0

    @property
    def global_rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    dp_world_size = world_size

    def train_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-batch."""
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size by changing the number of accumulation steps."""
        per_step = self.train_micro_batch_size_per_gpu() * self.world_size
        if train_batch_size % per_step:
            raise ValueError(
                f"train_batch_size {train_batch_size} is not a multiple of micro batch x ranks = {per_step}"
            )
        self._config.train_batch_size = train_batch_size
        self._config.gradient_accumulation_steps = train_batch_size // per_step

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size; the number of accumulation steps stays."""
        self._config.train_micro_batch_size_per_gpu = micro_batch_size
        self._config.train_batch_size = micro_batch_size * self.gradient_accumulation_steps() * self.world_size

    def zero_optimization_stage(self) -> int:
        return self._config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self._config.zero_optimization.stage > 0

    def zero_optimization_partition_weights(self) -> bool:
        return self._config.zero_optimization.stage >= 3

    def zero_optimization_partition_gradients(self) -> bool:
        return self._config.zero_optimization.stage >= 2

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self._config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def fp16_enabled(self) -> bool:
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self._config.bf16.enabled

    def gradient_clipping(self) -> float:
        """The largest global gradient norm, 0 for none."""
        return self._config.gradient_clipping

    def dynamic_loss_scale(self) -> bool:
        return self.scaler is not None and self.scaler.dynamic

    def loss_scale(self) -> float:
        """The present factor on the loss; 1 without fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def cur_scale(self) -> float:
        """As `loss_scale()`."""
        return self.loss_scale()

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_type(self) -> list[str | None]:
        """The `type` entry of each parameter group, where the script gave one."""
        return [group.get("type") for group in self.optimizer.param_groups]

    def get_mom(self) -> list[float | tuple[float, float]]:
        """The momentum, or Adam's betas, of each parameter group."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]
