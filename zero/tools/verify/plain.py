"""The reference of `zero verify`: plain torch in the place of the engine. Each rank holds the whole
model.

It has the configuration, the count of micro-batches and DeepSpeed's names in common with the
engine, and nothing that computes: there are no groups, no hooks, no reductions in parts, no tiles.
A gradient is averaged by one all-reduce."""

from __future__ import annotations

import math

import torch
from torch import nn

from zero.accumulation import Accumulation
from zero.build import make_scheduler, place_buffers
from zero.comm.clock import Throughput
from zero.comm.communicator import Communicator, communicator
from zero.config import Config
from zero.core.init import Init
from zero.errors import UsageError
from zero.integrations.deepspeed.engine import DeepSpeedEngine
from zero.integrations.deepspeed.labels import label_whole
from zero.integrations.deepspeed.optimizer import ParameterOffload
from zero.optim.loss_scaler import LossScaler


class _NoHooks:
    """In the place of `zero.core.hooks.ModuleHooks`."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.forward_hooks: list = []
        self.backward_hooks: list = []

    def install(self) -> None: ...

    def remove(self) -> None: ...


# Whether a script has asked zero.Init for a dtype, in which the engine's values are rounded.
_init_rounds = False


def hold_whole_models() -> None:
    """From now on zero.Init does nothing in this process, so that each rank holds whole models."""

    def __init__(
        self: Init,
        module: nn.Module | None = None,
        config_dict_or_path: object = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        config: object = None,
        **others: object,
    ) -> None:
        global _init_rounds
        source = config_dict_or_path if config_dict_or_path is not None else config
        _init_rounds |= enabled and (dtype is not None or source is not None)
        self.enabled = False

    Init.__init__ = __init__  # pyright: ignore[reportAttributeAccessIssue]


class PlainEngine(DeepSpeedEngine):
    """Trains `model` as `DeepSpeedEngine` does, with torch alone. Offload, buckets and the stage
    have no effect.

    It saves nothing: it is there for a few steps.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Config,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: object | None = None,
        comm: Communicator | None = None,
    ):
        if comm is not None and comm.model is not None:
            raise UsageError(
                "zero verify: a model that is cut over ranks cannot be compared: run it without a "
                "mesh"
            )
        settings = settings.resolve(communicator().world_size)
        Accumulation.__init__(self, settings)
        self.comm = communicator()
        self.config = settings.origin.raw
        self.module = model
        self.optimizer = optimizer
        self.global_steps = self.skipped_steps = 0
        self.throughput = Throughput(settings.train_batch_size)
        self.groups = []
        self.activations = None
        self.is_compiled = False
        self._step_applied = False
        self._norm = None
        self.scaler = LossScaler.from_config(settings.fp16) if settings.fp16.enabled else None
        self._by_engine = False
        # fp32 sums over micro-batches, and later their mean over ranks. Parameters without a
        # gradient have none.
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._are_reduced = False
        given = self._place_parameters()
        # The optimizer trains fp32 values. A parameter in 16 bits has a second one for them. The
        # engine's begins with the values that a script gave, but those of zero.Init are rounded.
        first = {p: p.detach() for p in self._trained} if _init_rounds else given
        self._masters = {
            p: p if p.dtype == torch.float32 else nn.Parameter(first[p].float())
            for p in self._trained
        }
        for group in optimizer.param_groups if optimizer is not None else ():
            group["params"] = [self._masters.get(param, param) for param in group["params"]]
        if optimizer is not None:
            optimizer.parameter_offload = ParameterOffload(
                _NoHooks(model)
            )  # TRL looks for it there
            optimizer.overflow = False  # accelerate does not step the schedule after an overflow
        self.lr_scheduler = make_scheduler(lr_scheduler, optimizer)

    @torch.no_grad()
    def _place_parameters(self) -> dict[nn.Parameter, torch.Tensor]:
        """All parameters on the device, in the dtype they are computed in, with rank 0's values.

        Returns the values of each parameter in the dtype in which it was given.
        """
        given = {}
        in_16_bits = self.settings.fp16.enabled or self.settings.bf16.enabled
        place_buffers(self.module, self.comm, self.settings.data_types.buffer_dtype)
        for param in self.module.parameters():
            dtype = (
                self.settings.compute_dtype
                if in_16_bits and param.is_floating_point()
                else param.dtype
            )
            given[param] = param.data.to(self.comm.device).contiguous()
            self.comm.broadcast(given[param], src=0)
            param.data = given[param].to(dtype)
            label_whole(param)
        self._trained = [param for param in self.module.parameters() if param.requires_grad]
        for param in self._trained:
            param.register_post_accumulate_grad_hook(self._collect)
        return given

    @property
    def returned_optimizer(self) -> torch.optim.Optimizer | None:
        return self.optimizer

    # -- training

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run backward for one micro-batch; as the engine's."""
        if scale_wrt_gas:
            loss = loss / self.settings.gradient_accumulation_steps
        self._by_engine = True
        try:
            self.scale(loss).backward(retain_graph=retain_graph)
        finally:
            self._by_engine = False
        return loss

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        return loss if self.scaler is None else loss.float() * self.scaler.scale

    def _collect(self, param: nn.Parameter) -> None:
        """Add a micro-batch's gradient.

        Only `backward` has divided the loss by the number of micro-batches.
        """
        factor = 1.0 if self._by_engine else 1.0 / self.settings.gradient_accumulation_steps
        grad = param.grad.float() * factor
        param.grad = None
        self._sums[param] = self._sums[param] + grad if param in self._sums else grad

    @torch.no_grad()
    def gradient(self, param: nn.Parameter) -> torch.Tensor:
        """The fp32 mean over micro-batches and ranks, unclipped, without the loss scale.

        All ranks must ask.
        """
        if not self._are_reduced:
            whole = 1 if self.settings.gradient_allreduce_op == "sum" else self.comm.world_size
            for each in self._trained:
                total = self._sums.get(each)
                total = (
                    torch.zeros_like(each, dtype=torch.float32)
                    if total is None
                    else total.contiguous()
                )
                self._sums[each] = self.comm.all_reduce(total) / (whole * self.loss_scale())
            self._are_reduced = True
        return self._sums[param]

    def value(self, param: nn.Parameter) -> torch.Tensor:
        """The fp32 value that the optimizer trains."""
        return self._masters[param].detach()

    def state_keys(self) -> list[str]:
        """Names of the optimizer's states that are ordinary tensors of their parameter's shape."""
        return sorted({key for param in self._trained for key in self._states(param)})

    def state(self, param: nn.Parameter, key: str) -> torch.Tensor | None:
        """The optimizer's state of that name, as fp32; None if there is none for this parameter."""
        value = self._states(param).get(key)
        return None if value is None else value.float()

    def _states(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        state = self.optimizer.state.get(self._masters[param], {})
        return {
            key: v
            for key, v in state.items()
            if type(v) is torch.Tensor and v.dim() and v.shape == param.shape
        }

    @torch.no_grad()
    def step(self) -> None:
        """As the engine's.

        A parameter without a gradient is updated with one of zeros, as the engine does.
        """
        if self.optimizer is None:
            raise UsageError(
                "step: this engine has no optimizer; pass one to initialize() or configure "
                "'optimizer'"
            )
        boundary = (
            self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation()
        )
        self.micro_steps += 1
        self._step_applied = False
        if not boundary:
            return
        self.global_steps += 1
        for param in self._trained:
            self._masters[param].grad = self.gradient(param)
        masters = list(self._masters.values())
        self._norm = nn.utils.get_total_norm([master.grad for master in masters]).item()
        overflow = not math.isfinite(self._norm) and (
            self.settings.bf16.check_grad_overflow or not self.settings.bf16.enabled
        )
        self.optimizer.overflow = overflow
        if self.scaler is not None:
            self.scaler.update(overflow)
        if overflow:
            self.skipped_steps += 1
        else:
            self._update(masters)
        self.zero_grad()

    def _update(self, masters: list[nn.Parameter]) -> None:
        if self.settings.gradient_clipping:
            nn.utils.clip_grad_norm_(masters, self.settings.gradient_clipping)
        self.optimizer.step()
        for param, master in self._masters.items():
            if param is not master:
                param.copy_(master)
        self._step_applied = True
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._sums.clear()
        self._are_reduced = False
        for master in self._masters.values():
            master.grad = None

    def get_global_grad_norm(self) -> float | None:
        return self._norm

    # -- without effect here

    def compile(self, *args: object, **kwargs: object) -> None: ...

    def reshard(self) -> None: ...

    def destroy(self) -> None: ...

    def save_checkpoint(self, *args: object, **kwargs: object) -> bool:
        return True

    def save_16bit_model(self, *args: object, **kwargs: object) -> bool:
        return True

    def _count_samples(self) -> None: ...

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict:
        return self.module.state_dict()
