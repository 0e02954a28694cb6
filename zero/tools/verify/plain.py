"""The reference of `zero verify`: plain torch in place of the engine. Each rank holds the whole
model.

It has the configuration, the count of micro-batches and DeepSpeed's names in common with the
engine, and nothing that computes: there are no groups, no hooks, no reductions in parts, no
sub-groups. A gradient is averaged by one all-reduce."""

from __future__ import annotations

import inspect
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zero.build import make_scheduler, place_buffers
from zero.comm.communicator import Communicator, communicator
from zero.config import Config, ResolvedConfig
from zero.core.micro_batches import MicroBatches
from zero.errors import UsageError
from zero.fragments import FP32, GRADIENT
from zero.init import Init
from zero.integrations.deepspeed.engine import DeepSpeedEngine
from zero.integrations.deepspeed.labels import label_whole
from zero.integrations.deepspeed.optimizer import ParameterOffload
from zero.optim.loss_scaler import LossScaler
from zero.parallel.experts import size_of


def _no_hooks(module: nn.Module) -> Any:
    """Takes the place of `zero.core.hooks.ModuleHooks`."""
    nothing = dict.fromkeys(
        ("install", "remove", "forget_broken_pass", "leave_stand_ins"), lambda: None
    )
    return SimpleNamespace(module=module, forward_hooks=[], backward_hooks=[], **nothing)


# Whether a script has asked zero.Init for a dtype, in which the engine's values are rounded.
_init_rounds = False
_SIGNATURE = inspect.signature(Init.__init__)


def hold_whole_models() -> None:
    """From now on zero.Init does nothing in this process, so that each rank holds whole models."""

    def __init__(self: Init, *args: object, **kwargs: object) -> None:  # noqa: N807
        global _init_rounds
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        sources = [given.get(name) for name in ("config_dict_or_path", "config", "dtype")]
        _init_rounds |= given.get("enabled", True) and sources != [None] * 3
        self.enabled = False

    Init.__init__ = __init__  # pyright: ignore[reportAttributeAccessIssue]


class PlainOptimizer:
    """Takes the place of `DeepSpeedOptimizer` and the reducer: sums whole gradients in fp32, and
    runs the script's optimizer on whole fp32 tensors.

    A parameter that has got no gradient on any rank is left alone, as by the engine. `masters`: the
    fp32 values of the parameters, which are the parameters themselves in fp32.
    """

    deferring = nullcontext

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: dict[nn.Parameter, nn.Parameter],
        comm: Communicator,
        settings: ResolvedConfig,
        scaler: LossScaler | None,
    ):
        self.optimizer = optimizer
        self.masters = masters
        self.comm = comm
        self.settings = settings
        self.scaler = scaler
        self.overflow = False  # accelerate does not step the schedule after an overflow
        self.grad_norm: float | None = None
        # Sums over micro-batches; parameters without a gradient have none.
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        # Means over micro-batches and ranks; None if no rank has a gradient.
        self._means: dict[nn.Parameter, torch.Tensor | None] = {}
        self._disturbance: torch.Generator | None = None
        for group in optimizer.param_groups:
            group["params"] = [masters.get(param, param) for param in group["params"]]
        for param in masters:
            param.register_post_accumulate_grad_hook(self._collect)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def _collect(self, param: nn.Parameter) -> None:
        assert param.grad is not None  # autograd has just set it
        grad = param.grad.float()
        if not MicroBatches.backwards_of_engines:  # an engine divides the loss itself
            grad = grad / self.settings.gradient_accumulation_steps
        param.grad = None
        self._sums[param] = self._sums[param] + grad if param in self._sums else grad

    @torch.no_grad()
    def gradients(self) -> dict[nn.Parameter, torch.Tensor | None]:
        """Means over micro-batches and ranks in fp32, unclipped, without the loss scale.

        All ranks must ask.
        """
        if self._means:
            return self._means
        count = 1 if self.settings.gradient_allreduce_op == "sum" else self.comm.world_size
        scale = 1.0 if self.scaler is None else self.scaler.scale
        for param in self.masters:
            total = self._sums.get(param, torch.zeros_like(param, dtype=torch.float32))
            holders = torch.tensor(float(param in self._sums), device=self.comm.device)
            mean = self.comm.all_reduce(total.contiguous()) / (count * scale)
            self._means[param] = mean if self.comm.all_reduce(holders) else None
        return self._means

    @torch.no_grad()
    def step(self) -> bool:
        """Whether the values were updated, which they are not after an overflow."""
        for param, gradient in self.gradients().items():
            self.masters[param].grad = gradient
        masters, settings = self.masters.values(), self.settings
        most = settings.gradient_clipping or math.inf
        self.grad_norm = nn.utils.clip_grad_norm_(masters, most).item()
        checks = settings.bf16.check_grad_overflow or not settings.bf16.enabled
        self.overflow = checks and not math.isfinite(self.grad_norm)
        if self.scaler is not None:
            self.scaler.update(self.overflow)
        if not self.overflow:
            self.optimizer.step()
            for param, master in self.masters.items():
                if param is not master:
                    param.copy_(master)
            if self._disturbance is not None:
                self.disturb()
        self.zero_grad()
        return not self.overflow

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._sums.clear()
        self._means.clear()
        for master in self.masters.values():
            master.grad = None

    clear = zero_grad

    @torch.no_grad()
    def disturb(self) -> None:
        """Change all values by up to one unit in their last place, now and after each step. All
        ranks make the same changes.
        """
        if self._disturbance is None:
            self._disturbance = torch.Generator().manual_seed(0)
        for values in dict.fromkeys([*self.masters, *self.masters.values()]):
            noise = torch.rand(values.shape, dtype=torch.float64, generator=self._disturbance)
            factor = 1 + torch.finfo(values.dtype).eps * (2 * noise - 1)
            values.copy_(values.double() * factor.to(values.device))

    def read(self, param: nn.Parameter, kind: str) -> torch.Tensor | None:
        """The fp32 value, the gradient, or the optimizer's state of this name; None if there is
        none.
        """
        if kind == GRADIENT:
            return self.gradients()[param]
        if kind == FP32:
            return self.masters[param].detach()
        state = self.optimizer.state.get(self.masters[param], {}).get(kind)
        is_ordinary = type(state) is torch.Tensor and state.shape == param.shape
        return state.float() if is_ordinary else None


class PlainEngine(DeepSpeedEngine):
    """Trains `model` as `DeepSpeedEngine` does, with torch alone. Offload, buckets and the stage
    have no effect.

    It saves nothing: it is there for a few steps.
    """

    optimizer: Any
    reducer: Any

    def __init__(
        self,
        model: nn.Module,
        settings: Config,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: object | None = None,
        comm: Communicator | None = None,
    ):
        if (comm is not None and comm.model is not None) or size_of(model) > 1:
            raise UsageError(
                "zero verify: a model that a mesh or expert_parallel divides over ranks cannot be "
                "compared: run it without that"
            )
        comm = communicator()
        resolved = settings.resolve(comm.world_size)
        nn.Module.__init__(self)
        self._begin(model, resolved, comm)
        self.groups = []
        self.hooks: Any = _no_hooks(model)
        given = self._place_parameters(resolved)
        self.reducer = None
        if optimizer is not None:
            # The engine's values begin with those that a script gave, but those of zero.Init are
            # rounded.
            masters = {
                param: param
                if param.dtype == torch.float32
                else nn.Parameter((param.detach() if _init_rounds else value).float())
                for param, value in given.items()
                if param.requires_grad
            }
            self.optimizer = PlainOptimizer(optimizer, masters, comm, resolved, self.scaler)
            # TRL looks for it there
            self.optimizer.parameter_offload = ParameterOffload(self.hooks)
            self.reducer = self.optimizer
        self.lr_scheduler = make_scheduler(lr_scheduler, optimizer)

    @torch.no_grad()
    def _place_parameters(self, settings: ResolvedConfig) -> dict[nn.Parameter, torch.Tensor]:
        """All parameters on the device, in the dtype they are computed in, with rank 0's values.

        Returns the values of each parameter in the dtype in which it was given.
        """
        given = {}
        in_16_bits = settings.fp16.enabled or settings.bf16.enabled
        place_buffers(self.module, self.comm, settings.buffer_dtype)
        for param in self.module.parameters():
            given[param] = param.data.to(self.comm.device).contiguous()
            self.comm.broadcast(given[param], src=0)
            converts = in_16_bits and param.is_floating_point()
            param.data = given[param].to(settings.compute_dtype if converts else param.dtype)
            label_whole(param)
        return given

    # -- without effect here

    def compile(self, *args: object, **kwargs: object) -> None: ...

    def destroy(self) -> None: ...

    def _samples_of_step(self) -> int:
        return 0
