"""Runs in a process of the user's script: follows the first engine for some steps, then ends the
process.

The process also ends before the script saves anything: the user's own checkpoints and logs stay as
they are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from zero.config import Config
from zero.integrations.deepspeed import engine as face
from zero.integrations.deepspeed.engine import DeepSpeedEngine
from zero.integrations.hf import resume
from zero.tools.profile.running import FOLDER, PROGRESS, STEPS

_SAVES = ("save_checkpoint", "save_16bit_model", "_zero3_consolidated_16bit_state_dict")
_runs: list[BoundedRun] = []


class BoundedRun:
    """Counts an engine's optimizer steps and ends all ranks' processes after `steps` of them, or
    before a save.

    A subclass says what happens in `before_update` and `after_update`, and writes into `folder`."""

    def __init__(self, engine: DeepSpeedEngine, folder: Path, steps: int):
        self.engine = engine
        self.folder = folder
        self.steps = steps
        self.step_number = 0
        self._step = engine.step
        # The script calls these on the engine, so this one object gets others.
        for name, method in {"step": self.step, **dict.fromkeys(_SAVES, self._end)}.items():
            setattr(engine, name, method)
        # The Trainer makes its checkpoint's folder on rank 0, maybe before it calls the engine.
        resume.before_checkpoint = self._end

    def before_update(self) -> None:
        """Called before the step number `step_number`, counted from 1, updates parameters."""

    def after_update(self) -> None:
        """Called after it."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        engine = self.engine
        boundary = engine.ends_step
        if boundary:
            self.step_number += 1
            self.before_update()
        self._step(*args, **kwargs)
        if boundary:
            self.after_update()
            if engine.comm.job.rank == 0:
                (self.folder / PROGRESS).write_text(str(self.step_number))
            if self.step_number == self.steps:
                self._end()

    def _end(self, *_: object, **__: object) -> NoReturn:
        """End this process. No rank ends while another one still needs it.

        It ends immediately. An interpreter that shut down step by step, while the other ranks'
        connections closed, aborted now and then, which the command would take for a failed run."""
        self.engine.comm.control("the end of a bounded run").wait_for_all()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def bound_first_engine(
    start: Callable[[DeepSpeedEngine, Path, int], BoundedRun],
    make: Callable[..., DeepSpeedEngine] = DeepSpeedEngine,
    check: Callable[[Config], None] = lambda settings: None,
) -> None:
    """Have `initialize` start a bounded run of the first engine with an optimizer, with the folder
    and the steps that the environment names. All engines are made by `make`.

    `check` may refuse the configuration. Monitors are switched off.
    """
    folder, steps = Path(os.environ[FOLDER]), int(os.environ[STEPS])

    def make_and_bound(model: nn.Module, settings: Config, *args: object) -> DeepSpeedEngine:
        check(settings)
        made = make(model, _without_monitors(settings), *args)
        if made.optimizer is not None and not _runs:
            _runs.append(start(made, folder, steps))
        return made

    face.make_engine = make_and_bound


def _without_monitors(settings: Config) -> Config:
    names = "json_monitor csv_monitor tensorboard wandb flops_profiler comms_logger".split()
    off = {name: getattr(settings, name).model_copy(update={"enabled": False}) for name in names}
    others = {"steps_per_print": None, "wall_clock_breakdown": False, "memory_breakdown": False}
    return settings.model_copy(update=off | others)
