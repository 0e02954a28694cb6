"""Computes an update: the new values of one sub-group from its gradient and the step's
hyperparameters.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import torch

from zero.errors import UsageError
from zero.optim import adam8bit, adam_cpu
from zero.optim.rounding import StochasticRounding
from zero.optim.subgroups import SubGroupInMemory, is_state_tensor
from zero.optim.whole_tensor import twin_of


@dataclass(eq=False, repr=False)
class SubGroupUpdate:
    """The update of one step, sub-group by sub-group, with the settings that `optimizer` has now: a
    scheduler may change them while sub-groups are still to be updated.

    Where `adam_cpu` does not compute, a twin of the optimizer takes torch's `step()` for one
    sub-group at a time. It shares the optimizer's settings and hooks, but not its param groups and
    state, because the user's own `zero_grad()` or scheduler may run at the same time in another
    thread.

    Args:
        factor: by which gradients are multiplied.
        is_plain_adam: `adam_cpu` updates sub-groups in host memory, or torch's fused step where
            that is not compiled.
        has_kernel: whether `adam_cpu` is compiled on all ranks.
        rounding: rounds bf16 masters; None for fp32 ones.
        state_dtype: of the optimizer's state; uint8: Adam's moments are codes
            (`zero.optim.adam8bit`).
    """

    optimizer: torch.optim.Optimizer
    factor: float
    _: KW_ONLY
    is_plain_adam: bool
    has_kernel: bool = True
    rounding: StochasticRounding | None = None
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self._param_groups: list[dict] = [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
            | {"params": []}
            for group in self.optimizer.param_groups
        ]
        self._by_kernel = self.is_plain_adam and self.has_kernel and adam_cpu.is_compiled()
        self._on_host = {"fused": True, "foreach": False} if self.is_plain_adam else {}
        self._has_narrow_state = self.state_dtype == torch.bfloat16
        self._has_codes = self.state_dtype == torch.uint8

        if not self._by_kernel:
            _ = self._twin  # made now, because a script may change its optimizer before the update

    @cached_property
    def _twin(self) -> torch.optim.Optimizer:
        return twin_of(self.optimizer, param_groups=self._param_groups)

    def __call__(self, values: SubGroupInMemory) -> torch.Tensor:
        """Update master and state; returns the values for the group's weights."""
        sub_group, stored_master, stored = values.sub_group, values.master, values.state
        param_group = self._param_groups[sub_group.group_index]
        if self.rounding is not None:
            values.master = stored_master.float()
        if self._has_narrow_state:
            values.state = {k: v.float() if is_state_tensor(v) else v for k, v in stored.items()}
        out = None
        if self._by_kernel and sub_group.master.device.type == "cpu":
            out = values.weights_target() if self.rounding is None else None
            self._adam(values, param_group, out)
        else:
            if self._has_codes:
                values.state = adam8bit.decoded(stored, sub_group.master.numel())
            self._torch_step(values, param_group)
            if self._has_codes:
                values.state |= adam8bit.encoded(values.state, stored, values.state["step"])
        if out is not None:
            return out
        if self.rounding is not None:
            self._narrow(self.rounding, values, stored_master, stored)
        return values.master

    def _adam(self, values: SubGroupInMemory, param_group: dict, out: torch.Tensor | None) -> None:
        """Adam on host memory in one pass, which also rounds to the weights' dtype into `out`."""
        state = values.state
        if not state:
            state |= adam_cpu.new_state(values.master, self._has_codes)
        # It may have been counted on the device before.
        state["step"] = state["step"].to("cpu") + 1
        tensors = values.master, values.grad, state["exp_avg"], state["exp_avg_sq"], out
        adam_cpu.adam(*tensors, param_group, int(state["step"]), self.factor)

    def _torch_step(self, values: SubGroupInMemory, param_group: dict) -> None:
        """The optimizer's own `step()`.

        Raises UsageError if it changes a number of the param group, which would change once for
        each sub-group.
        """
        master, grad, factor = values.master.detach(), values.grad, self.factor
        if grad.dtype == master.dtype:
            master.grad = grad if factor == 1.0 else grad.mul_(factor)
        else:  # a vector of one element, unlike a number, widens and multiplies in one pass
            master.grad = grad * torch.full((1,), factor, dtype=master.dtype, device=grad.device)
        given = param_group.copy()
        if master.device.type == "cpu":
            param_group |= self._on_host
        if param_group.get("fused") and "step" in values.state:
            # It may have been counted on the host before.
            values.state["step"] = values.state["step"].to(master.device)
        self._twin.state = defaultdict(dict, {master: values.state})
        param_group["params"] = [master]
        before = param_group.copy()
        self._twin.step()
        for key, value in param_group.items():
            is_tensor = isinstance(value, torch.Tensor)
            if value is not before.get(key) and (is_tensor or value != before.get(key)):
                raise UsageError(
                    f"optimizer {type(self._twin).__name__} changes {key!r} of its param group in "
                    "step(), as schedule-free ones do, so it needs whole tensors: delete "
                    "zero_optimization.elementwise_optimizer"
                )
        values.state = self._twin.state[master]
        param_group |= {key: given[key] for key in self._on_host}
        # A reference would keep the sub-group's buffers from being used again.
        param_group["params"] = []
        self._twin.state = defaultdict(dict)

    def _narrow(
        self,
        rounding: StochasticRounding,
        values: SubGroupInMemory,
        master: torch.Tensor,
        stored: dict,
    ) -> None:
        """Round the updated values to bf16 into `master`, and the state if that is wanted.

        The state stays in the tensors of `stored`: on a device, freed ones could be used again
        before this has run."""
        shard, start = values.sub_group.shard, values.sub_group.start
        rounding.store(master, values.master, shard, start)
        values.master = master
        for key, value in values.state.items() if self._has_narrow_state else ():
            if is_state_tensor(value):
                target = stored.get(key)
                if target is None:
                    target = torch.empty_like(value, dtype=master.dtype)
                rounding.store(target, value, shard, start, key)
                values.state[key] = target
