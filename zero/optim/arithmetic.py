"""What an update computes: one tile's new values from its gradient and the hyper-parameters of the step.

This file does not know where tensors live, nor which ranks there are.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from zero.errors import UsageError
from zero.optim import cpu_adam
from zero.optim.updates import TileInMemory


def frozen(group: dict) -> dict:
    """A param group as it is now, without parameters: schedulers change groups, and tensors in them."""
    values = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
    return values | {"params": []}


def adam(values: TileInMemory, group: dict, factor: float, out: torch.Tensor | None, torch_sqrt: bool) -> None:
    """Adam on host memory in one pass. Args: as for `TorchStep`; out, torch_sqrt: as for `cpu_adam.adam`."""
    state = values.state
    if not state:
        state |= cpu_adam.new_state(values.master)
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

    A twin of the optimizer updates the tile. It shares the optimizer's settings and hooks, but not its param groups and
    state, because the user's own `zero_grad()` or scheduler may run at the same time in another thread.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: list[dict]):
        self._twin = object.__new__(type(optimizer))  # there is no way to copy an optimizer of any class
        self._twin.__dict__ |= optimizer.__dict__ | {"param_groups": groups}
        self._twin.__dict__.pop("step", None)  # torch's schedulers put a counting one there

    def __call__(self, values: TileInMemory, group: dict, factor: float) -> None:
        """Update `values.master` and `values.state` with `values.grad` times `factor`; `group` is one of the groups."""
        master, grad = values.master.detach(), values.grad.to(values.master.dtype)
        master.grad = grad if factor == 1.0 else grad.mul_(factor)
        if group.get("fused") and "step" in values.state:  # it may have been counted on the host before
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
        """Raise UsageError if the step has changed a number of the param group: it would change once for each tile."""

        def is_same(key: str, value: object) -> bool:
            return value is before.get(key) or (not isinstance(value, torch.Tensor) and value == before.get(key))

        if changed := [key for key, value in group.items() if not is_same(key, value)]:
            raise UsageError(
                f"optimizer {type(self._twin).__name__} changes {changed[0]!r} of its param group in step(), as "
                "schedule-free ones do, so it needs whole tensors: delete zero_optimization.elementwise_optimizer"
            )
