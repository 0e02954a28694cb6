"""What an update computes: one tile's new values from its gradient and the hyper-parameters of the
step.

This file does not know where tensors live, nor which ranks there are.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from zero.comm.work import Pending
from zero.errors import UsageError
from zero.offload.pinned import HostMemory
from zero.optim import adam8bit, cpu_adam
from zero.optim.background import TileInMemory
from zero.optim.rounding import StochasticRounding
from zero.optim.subgroups import is_state_tensor
from zero.optim.twin import twin_of


class TileUpdate:
    """The update of one step, tile by tile, with the settings that `optimizer` has now: a scheduler
    may change them while tiles are still to be updated.

    Args: factor: by which gradients are multiplied. by_kernel: `cpu_adam` updates tiles in host
    memory. torch_sqrt: its square roots are torch's. rounded: host memory for new values in the
    weights' dtype. rounding: rounds bf16 masters; None for fp32 ones. state_dtype: of the
    optimizer's state; uint8: Adam's moments are codes (`zero.optim.adam8bit`)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: float,
        *,
        by_kernel: bool,
        torch_sqrt: bool,
        rounded: HostMemory,
        rounding: StochasticRounding | None = None,
        state_dtype: torch.dtype = torch.float32,
    ):
        self._groups = [_frozen(group) for group in optimizer.param_groups]
        self._torch_step = TorchStep(optimizer, self._groups)
        self._factor = factor
        self._by_kernel = by_kernel
        self._torch_sqrt = torch_sqrt
        self._rounded = rounded
        self._rounding = rounding
        self._state_dtype = state_dtype

    def __call__(self, values: TileInMemory) -> Pending:
        """Update one tile in memory, and start to round it into the group's shard."""
        tile, narrow, stored = values.tile, values.master, values.state
        if self._rounding is not None:
            values.master = narrow.float()
        if self._state_dtype == torch.bfloat16:
            values.put_state(
                {k: v.float() if is_state_tensor(v) else v for k, v in values.state.items()}
            )
        group, result, coded = (
            self._groups[tile.group_index],
            values.master,
            self._state_dtype == torch.uint8,
        )
        if self._by_kernel and tile.master.device.type == "cpu":
            out = self._target(values)
            _adam(values, group, self._factor, out, self._torch_sqrt, coded)
            result = values.master if out is None else out
        else:
            if coded:
                values.put_state(adam8bit.decoded(stored, tile.master.numel()))
            self._torch_step(values, group, self._factor)
            if coded:
                values.put_state(
                    values.state | adam8bit.encoded(values.state, stored, values.state["step"])
                )
        if self._rounding is not None:
            result = self._narrow(values, narrow, stored)
        return tile.shard.round_into_shard(tile.start, result)

    def _target(self, values: TileInMemory) -> torch.Tensor | None:
        """Host memory for the updated values in the weights' dtype: the shard's own if it is there;

        None for fp32.
        """
        tile = values.tile
        shard = tile.group.shard[tile.start : tile.end]
        if shard.dtype == torch.float32 or self._rounding is not None:
            return None
        in_memory = shard.device.type == "cpu" and not tile.group.tier.holds_in_file(shard)
        return shard if in_memory else self._rounded.take(shard.nbytes).view(shard.dtype)

    def _narrow(self, values: TileInMemory, master: torch.Tensor, stored: dict) -> torch.Tensor:
        """Round the updated values, and the state if that is wanted, to bf16. `master` gets the
        values.

        The state stays in the tensors of `stored`: on a device, freed ones could be used again
        before this has run."""
        self._rounding.store(master, values.master, values.tile.shard, values.tile.start)
        values.master = master
        if self._state_dtype == torch.bfloat16:
            state = dict(values.state)
            for key, value in state.items():
                if is_state_tensor(value):
                    state[key] = (
                        stored[key]
                        if key in stored
                        else torch.empty_like(value, dtype=master.dtype)
                    )
                    self._rounding.store(
                        state[key], value, values.tile.shard, values.tile.start, key
                    )
            values.put_state(state)
        return master


def _frozen(group: dict) -> dict:
    """A param group as it is now, without parameters."""
    values = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
    }
    return values | {"params": []}


def _adam(
    values: TileInMemory,
    group: dict,
    factor: float,
    out: torch.Tensor | None,
    torch_sqrt: bool,
    coded: bool,
) -> None:
    """Adam on host memory in one pass.

    Args: as for `TorchStep`, `cpu_adam.adam` and `cpu_adam.new_state`.
    """
    state = values.state
    if not state:
        state |= cpu_adam.new_state(values.master, coded)
    state["step"] = state["step"].to("cpu") + 1  # it may have been counted on the device before
    beta1, beta2 = group["betas"]
    cpu_adam.adam(
        *(values.master, values.grad, state["exp_avg"], state["exp_avg_sq"], out),
        step=int(state["step"]),
        decoupled=group["decoupled_weight_decay"],
        factor=factor,
        torch_sqrt=torch_sqrt,
        **{name: group[name] for name in ("lr", "eps", "weight_decay")},
        **{"beta1": beta1, "beta2": beta2},
    )


class TorchStep:
    """The `step()` of any element-wise torch optimizer, for one tile at a time.

    A twin of the optimizer updates the tile. It shares the optimizer's settings and hooks, but not
    its param groups and state, because the user's own `zero_grad()` or scheduler may run at the
    same time in another thread."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: list[dict]):
        self._twin = twin_of(optimizer, param_groups=groups)

    def __call__(self, values: TileInMemory, group: dict, factor: float) -> None:
        """Update `values.master` and `values.state` with `values.grad` times `factor`;

        `group` is one of the groups.
        """
        master, grad = values.master.detach(), values.grad
        if grad.dtype == master.dtype:
            master.grad = grad if factor == 1.0 else grad.mul_(factor)
        else:  # a vector of one element, unlike a number, widens and multiplies in one pass
            master.grad = grad * torch.full((1,), factor, dtype=master.dtype, device=grad.device)
        if (
            group.get("fused") and "step" in values.state
        ):  # it may have been counted on the host before
            values.state["step"] = values.state["step"].to(master.device)
        self._twin.state = defaultdict(dict, {master: values.state})
        group["params"] = [master]
        before = group.copy()
        self._twin.step()
        self._refuse_changed(before, group)
        values.put_state(self._twin.state[master])
        # A reference would keep the tile's buffers from being used again.
        group["params"], self._twin.state = [], {}

    def _refuse_changed(self, before: dict, group: dict) -> None:
        """Raise UsageError if the step has changed a number of the param group: it would change
        once for each tile.
        """

        def is_same(key: str, value: object) -> bool:
            return value is before.get(key) or (
                not isinstance(value, torch.Tensor) and value == before.get(key)
            )

        if changed := [key for key, value in group.items() if not is_same(key, value)]:
            raise UsageError(
                f"optimizer {type(self._twin).__name__} changes {changed[0]!r} of its param group "
                "in step(), as "
                "schedule-free ones do, so it needs whole tensors: delete "
                "zero_optimization.elementwise_optimizer"
            )
