"""`CPUAdam`: torch's Adam under the call signature of `deepspeed.ops.adam.DeepSpeedCPUAdam`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class CPUAdam(torch.optim.Adam):
    """Adam or AdamW with the numerics of torch.

    accelerate puts it in the place of a user's `torch.optim.AdamW` when the optimizer is offloaded to the CPU, and
    scripts written for DeepSpeed make one themselves. The engine gives it the fp32 masters on the host to update, as
    it does with any optimizer.

    Args:
        model_params: parameters or parameter groups; what a group says for itself goes before the arguments here.
        lr: learning rate.
        bias_correction: only True.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the root of the second moment.
        weight_decay: decay rate; decoupled from the gradient with `adamw_mode`, else an L2 term in the gradient.
        amsgrad: keep the largest second moment seen.
        adamw_mode: AdamW if true, Adam if false.
        fp32_optimizer_states: only True.

    Raises `ValueError` for the two settings that are not there.
    """

    def __init__(
        self,
        model_params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ):
        if not bias_correction:
            raise ValueError("DeepSpeedCPUAdam: bias_correction=False is not supported; leave it at True")
        if not fp32_optimizer_states:
            raise ValueError("DeepSpeedCPUAdam: fp32_optimizer_states=False is not supported; leave it at True")
        super().__init__(
            model_params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adamw_mode,
        )
