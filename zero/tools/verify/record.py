"""Runs in a process of the user's script: records what an engine computes in its first steps, then
ends the process.

`zero verify` starts the script once for each of `MODES`, with these environment variables. This
file does not compare anything."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero.config import Config
from zero.errors import UsageError
from zero.fragments import FP32, GRADIENT, ParameterState
from zero.integrations.deepspeed.engine import DeepSpeedEngine
from zero.optim.subgroups import is_state_tensor
from zero.tools.profile.bounded_run import BoundedRun, bound_first_engine
from zero.tools.profile.running import FOLDER
from zero.tools.verify.command import DISTURBED, ENGINE
from zero.tools.verify.compare import STATE, VALUE
from zero.tools.verify.plain import PlainEngine, hold_whole_models

# Keys of a param group that name parameters, or say how to compute, which the engine decides.
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}


def set_up() -> None:
    """Have `initialize` make engines that are recorded, or plain ones, as the name of the folder
    says.
    """
    mode = Path(os.environ[FOLDER]).name
    if mode != ENGINE:
        hold_whole_models()
    make = DeepSpeedEngine if mode == ENGINE else PlainEngine
    bound_first_engine(partial(Recorder, mode=mode), make, _refuse_rounding)


def _refuse_rounding(settings: Config) -> None:
    keys = [
        f"zero_optimization.{key}" for key, value in settings.zero_optimization if value is True
    ]
    if settings.bf16.bf16_master_weights_and_grads:
        keys.append("bf16.bf16_master_weights_and_grads")
    if rounding := [key for key in keys if "quantized" in key or key.startswith("bf16")]:
        raise UsageError(f"zero verify: {rounding[0]} rounds: set it to false to compare")


class Recorder(BoundedRun):
    """Records the steps of one engine in `folder`, by rank 0, and ends all ranks' processes after
    `steps` of them.

    Files of step n: `n.KIND.pt` has fp32 tensors by parameter name: gradients (the mean over ranks,
    before clipping), and after the step values and each of the optimizer's states; and numbers:
    each rank's losses, settings, and the norm. `n.json` says whether the step was applied, and
    relative rounding errors. Of step 0, which is before the first one, there are the values."""

    def __init__(self, engine: DeepSpeedEngine, folder: Path, steps: int, mode: str = ENGINE):
        super().__init__(engine, folder, steps)
        self.optimizer: Any = engine.optimizer
        self.losses: list[float] = []
        self._backward = engine.backward
        engine.backward = self.backward
        vars(engine)["load_checkpoint"] = self._refuse_load
        if engine.comm.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        self._save(VALUE, FP32)
        self._write_facts(False)
        if mode == DISTURBED:
            self.optimizer.disturb()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.losses.append(loss.detach().float().item())
        return self._backward(loss, *args, **kwargs)

    def before_update(self) -> None:
        self._save(GRADIENT, GRADIENT)
        self._settings = _settings(self.optimizer.param_groups)

    def after_update(self) -> None:
        engine = self.engine
        self._save(VALUE, FP32)
        for key in self._state_keys():
            self._save(f"{STATE}{key}", key)
        skipped = {"whether the step was skipped": not engine.was_step_applied()}
        losses = engine.comm.control("losses").exchange(lambda: self.losses)
        numbers = {
            "loss": {
                f"micro-batch {number} on rank {rank}": loss
                for rank, of_rank in enumerate(losses)
                for number, loss in enumerate(of_rank)
            },
            "setting": skipped | {"the loss scale": engine.loss_scale()} | self._settings,
            "norm": {"all gradients": engine.get_global_grad_norm()},
        }
        self.losses = []
        for kind, found in numbers.items():
            self._write(kind, {name: torch.tensor(float(value)) for name, value in found.items()})
        self._write_facts(engine.was_step_applied())

    def _write(self, kind: str, tensors: dict[str, torch.Tensor]) -> None:
        if self.engine.comm.rank == 0:
            torch.save(tensors, self.folder / f"{self.step_number}.{kind}.pt")

    def _write_facts(self, applied: bool) -> None:
        """`n.json`, with the eps of the dtypes in which forward and update compute."""
        settings, optimizer = self.engine.settings, self.optimizer
        dtypes = settings.compute_dtype, settings.message_dtype or settings.compute_dtype
        # Optimizers of whole tensors, such as Muon, compute in bf16; Adam's subclasses do not.
        is_whole = not isinstance(self.engine, PlainEngine) and optimizer.whole is not None
        narrow = is_whole and not isinstance(optimizer.optimizer, torch.optim.Adam)
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        of_update = torch.finfo(torch.bfloat16 if narrow else torch.float32).eps
        if self.engine.comm.rank == 0:
            facts = {"applied": applied, "eps": eps, "eps_of_update": of_update}
            (self.folder / f"{self.step_number}.json").write_text(json.dumps(facts))

    def _refuse_load(self, *_: object, **__: object) -> None:
        raise UsageError(
            "zero verify compares from the first step on: start the script without resuming"
        )

    def _state_keys(self) -> list[str]:
        """Names of the optimizer's states that are tensors of their parameter's size, on any
        rank.
        """
        states = self.optimizer.state.values()
        here = {key for state in states for key, value in state.items() if is_state_tensor(value)}
        everywhere = self.engine.comm.control("names of states").exchange(lambda: here)
        return sorted(set().union(*everywhere))

    def _save(self, name: str, kind: str) -> None:
        """A collective: every rank reads."""
        tensors, engine = {}, self.engine
        for key, param in engine.module.named_parameters():
            if not param.requires_grad:
                continue
            if isinstance(engine, PlainEngine):
                value = self.optimizer.read(param, kind)
            else:
                value = ParameterState(param, kind).read_full()
            if value is not None and engine.comm.rank == 0:
                tensors[key] = value.to("cpu", copy=True).contiguous()
        self._write(name, tensors)


def _settings(param_groups: list[dict[str, Any]]) -> dict[str, float]:
    """The numbers of all param groups by their names; the two of betas are betas0 and betas1."""
    found = {}
    for number, group in enumerate(param_groups):
        for key, given in group.items():
            several = enumerate(given) if isinstance(given, (tuple, list)) else [("", given)]
            for place, value in several if key not in _HOW else ():
                is_tensor = isinstance(value, torch.Tensor) and value.numel() == 1
                if is_tensor or isinstance(value, (int, float)):
                    found[f"{key}{place} of param group {number}"] = float(value)
    return found
