"""In a process of the user's script: write down what an engine computes in its first steps, then
end the process.

`zero verify` starts the script twice, with these environment variables. This file does not compare
anything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from zero.config import Config
from zero.errors import UsageError
from zero.fragments import FP32, GRADIENT, ParameterState
from zero.integrations.deepspeed.engine import DeepSpeedEngine
from zero.optim.subgroups import is_state_tensor
from zero.tools.profile.bounded_run import BoundedRun, bound_first_engine
from zero.tools.verify.plain import PlainEngine, hold_whole_models

FOLDER, MODE, STEPS = "ZERO_VERIFY_FOLDER", "ZERO_VERIFY_MODE", "ZERO_VERIFY_STEPS"


def set_up() -> None:
    """Have `initialize` make engines that are recorded, or plain ones: as the environment says."""
    plain = os.environ[MODE] == "plain"
    if plain:
        hold_whole_models()
    folder, steps = Path(os.environ[FOLDER]), int(os.environ[STEPS])
    make = PlainEngine if plain else DeepSpeedEngine
    bound_first_engine(lambda engine: Recorder(engine, folder, steps), make, _refuse_rounding)


def _refuse_rounding(settings: Config) -> None:
    zero = settings.zero_optimization
    of_weights = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    for key in (*of_weights, "zero_quantized_gradients", "zero_quantized_moments"):
        if getattr(zero, key):
            raise UsageError(
                f"zero verify: zero_optimization.{key} rounds on purpose: set it to false to "
                "compare"
            )
    if settings.bf16.bf16_master_weights_and_grads:
        raise UsageError(
            "zero verify: bf16.bf16_master_weights_and_grads rounds at random: set it to false to "
            "compare"
        )


class Recorder(BoundedRun):
    """Records the steps of one engine in `folder`, by rank 0, and ends all ranks' processes after
    `steps` of them.

    Files: `start.safetensors` with the first values; for step n `n.gradients.safetensors` (the mean
    over ranks, before clipping), `n.values.safetensors` and for each optimizer state
    `n.state.KEY.safetensors` (after the step), all fp32 by parameter name. `n.json` has each rank's
    losses, and what the step has done. `facts.json` has what the comparison must know."""

    def __init__(self, engine: DeepSpeedEngine, folder: Path, steps: int):
        super().__init__(engine, steps)
        self.folder = folder
        self.losses: list[float] = []
        self._backward = engine.backward
        engine.backward = self.backward
        engine.load_checkpoint = self._refuse_load
        settings = engine.settings
        dtypes = settings.compute_dtype, settings.communication_data_type or settings.compute_dtype
        coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        facts = {"dtype": str(coarsest).removeprefix("torch."), "ranks": engine.comm.world_size}
        facts["accumulation"] = settings.gradient_accumulation_steps
        if not isinstance(engine, PlainEngine):  # a class that is made from Adam is taken for one
            inner = engine.optimizer.optimizer
            facts["elementwise"] = engine.optimizer.whole is None or isinstance(
                inner, torch.optim.Adam
            )
        facts["names"] = [name for name, _ in self._trained()]
        if engine.comm.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "facts.json").write_text(json.dumps(facts))
        self._save("start", self._values)

    def backward(self, loss: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        self.losses.append(loss.detach().float().item())
        return self._backward(loss, *args, **kwargs)

    def before_update(self) -> None:
        self._save(f"{self.step_number}.gradients", self._gradient)
        self._groups = [
            {key: number for key, value in group.items() if (number := _number(value)) is not None}
            for group in self.engine.optimizer.param_groups
        ]

    def after_update(self) -> None:
        engine = self.engine
        self._save(f"{self.step_number}.values", self._values)
        for key in self._state_keys():
            self._save(f"{self.step_number}.state.{key}", partial(self._state, key))
        done = {"losses": engine.comm.exchange(self.losses), "groups": self._groups}
        done |= {
            "norm": engine.get_global_grad_norm(),
            "applied": engine.was_step_applied(),
            "scale": engine.loss_scale(),
        }
        self.losses = []
        if engine.comm.rank == 0:
            (self.folder / f"{self.step_number}.json").write_text(json.dumps(done))

    def _refuse_load(self, *_: object, **__: object) -> None:
        raise UsageError(
            "zero verify compares from the first step on: start the script without resuming"
        )

    def _gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        if isinstance(self.engine, PlainEngine):
            return self.engine.gradient(param)
        return ParameterState(param, GRADIENT).read_full()

    def _values(self, param: nn.Parameter) -> torch.Tensor | None:
        if isinstance(self.engine, PlainEngine):
            return self.engine.value(param)
        return ParameterState(param, FP32).read_full()

    def _state_keys(self) -> list[str]:
        """Names of the optimizer's states that are tensors of their parameter's size, on any
        rank.
        """
        engine = self.engine
        if isinstance(engine, PlainEngine):
            return engine.state_keys()
        own = {
            key
            for state in engine.optimizer.state.values()
            for key, v in state.items()
            if is_state_tensor(v)
        }
        return sorted(set().union(*engine.comm.exchange(own)))

    def _state(self, key: str, param: nn.Parameter) -> torch.Tensor | None:
        if isinstance(self.engine, PlainEngine):
            return self.engine.state(param, key)
        return ParameterState(param, key).read_full()

    def _save(self, name: str, read: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
        found = {}
        for key, param in self._trained():
            value = read(param)  # a collective: every rank reads
            if value is not None and self.engine.comm.rank == 0:
                found[key] = value.to("cpu", copy=True).contiguous()
        if self.engine.comm.rank == 0:
            save_file(found, self.folder / f"{name}.safetensors")

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (
            (name, param)
            for name, param in self.engine.module.named_parameters()
            if param.requires_grad
        )


def _number(value: object) -> object:
    """A setting of a param group, if JSON can hold it;

    None for others and for tensors of several elements.
    """
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    simple = (bool, int, float, str)
    is_sequence = isinstance(value, (tuple, list)) and all(
        isinstance(each, simple) for each in value
    )
    return list(value) if is_sequence else value if isinstance(value, simple) else None
