"""The simplest ZeRO-3, in torch alone. It is the specification of the engine, which must compute
the same bits.

Between steps a rank has its slice of each flattened parameter, and the optimizer updates the
slices. In a step all parameters are gathered, and nothing overlaps. The engine adds groups,
prefetch, buckets and offload. These change when and where something is computed, and never the
result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from tests.dist.training import take_step


class NaiveZero3:
    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ):
        self.model = model
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.shapes = [param.shape for param in self.params]
        self.shards = [
            nn.Parameter(self._slices(param.detach())[self.rank].clone()) for param in self.params
        ]
        self.optimizer = make_optimizer(self.shards)

    def _slices(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return one slice of equal length for each rank. The end is padded."""
        padded = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % self.world_size))
        return padded.chunk(self.world_size)

    @torch.no_grad()
    def unshard(self) -> None:
        for param, shape, shard in zip(self.params, self.shapes, self.shards, strict=True):
            slices = [torch.empty_like(shard) for _ in range(self.world_size)]
            dist.all_gather(slices, shard.detach())
            param.data = torch.cat(slices)[: shape.numel()].view(shape)

    def reshard(self) -> None:
        for param in self.params:
            param.data = torch.empty(0)

    def _add(self, total: torch.Tensor, grad: torch.Tensor) -> None:
        """Add this rank's slices of all ranks' gradients to `total`, in the order of ranks."""
        everyones = [torch.empty_like(grad) for _ in range(self.world_size)]
        dist.all_gather(everyones, grad.contiguous())
        for each in everyones:
            total += self._slices(each)[self.rank]

    def step(
        self, micro_batches: Sequence[dict[str, torch.Tensor]], clip: float = 0.0
    ) -> tuple[list[float], float]:
        """Return this rank's losses, and the norm of the mean gradient over all micro-batches and
        ranks.
        """
        self.unshard()
        sums, losses = [torch.zeros_like(shard) for shard in self.shards], []
        for batch in micro_batches:
            loss = self.model(**batch)["loss"]
            (loss / len(micro_batches)).backward()
            losses.append(loss.item())
            for total, param in zip(sums, self.params, strict=True):
                self._add(total, param.grad)
                param.grad = None
        squares = torch.stack([(total / self.world_size).square().sum() for total in sums]).sum()
        dist.all_reduce(squares)
        norm = squares.sqrt().item()
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for shard, total in zip(self.shards, sums, strict=True):
            shard.grad = total * (factor / self.world_size)
        take_step(self.optimizer)
        self.reshard()
        return losses, norm
