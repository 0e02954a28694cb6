"""In a process of the user's script: follow the first engine for some steps, then end the process.

The process also ends before the script saves anything: the user's own checkpoints and logs stay as
they are."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from zero.config import Config
from zero.integrations.deepspeed import engine as face
from zero.integrations.deepspeed.engine import DeepSpeedEngine

# A checkpoint's folder of the Trainer.
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_followed: list[BriefRun] = []


class BriefRun:
    """Counts an engine's optimizer steps and ends all ranks' processes after `steps` of them, or
    before a save.

    A subclass says what happens in `before_update` and `after_update`. The number of the last step
    is written to the file `progress`."""

    def __init__(self, engine: DeepSpeedEngine, steps: int, progress: Path | None = None):
        self.engine = engine
        self.steps = steps
        self.step_number = 0
        self._progress = progress
        self._ends = False
        self._step = engine.step
        engine.step = self.step
        for name in ("save_checkpoint", "save_16bit_model", "_zero3_consolidated_16bit_state_dict"):
            setattr(engine, name, self._end)
        sys.addaudithook(self._audit)

    def before_update(self) -> None:
        """Called before the step number `step_number`, counted from 1, updates parameters."""

    def after_update(self) -> None:
        """Called after it."""

    def step(self, *args: object, **kwargs: object) -> None:
        engine = self.engine
        boundary = (
            engine.is_gradient_accumulation_boundary() or not engine.managed_gradient_accumulation()
        )
        if boundary:
            self.step_number += 1
            self.before_update()
        self._step(*args, **kwargs)
        if boundary:
            self.after_update()
            if self._progress is not None and engine.comm.job.rank == 0:
                self._progress.write_text(str(self.step_number))
            if self.step_number == self.steps:
                self._end()

    def _audit(self, event: str, arguments: tuple) -> None:
        """The Trainer makes its checkpoint's folder on rank 0, which may be before it calls the
        engine.
        """
        if (
            event == "os.mkdir"
            and not self._ends
            and _CHECKPOINT.fullmatch(os.path.basename(os.fsdecode(arguments[0])))
        ):
            self._end()

    def _end(self, *_: object, **__: object) -> None:
        self._ends = True
        self.engine.comm.job.exchange("done")  # no rank ends while another one still needs it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def follow(
    start: Callable[[DeepSpeedEngine], BriefRun],
    make: Callable[..., DeepSpeedEngine] = DeepSpeedEngine,
    check: Callable[[Config], None] = lambda settings: None,
) -> None:
    """Have `initialize` start a brief run of the first engine with an optimizer. All engines are
    made by `make`.

    `check` may refuse the configuration. Monitors are switched off.
    """

    def make_followed(model: nn.Module, settings: Config, *args: object) -> DeepSpeedEngine:
        check(settings)
        made = make(model, _without_monitors(settings), *args)
        if made.optimizer is not None and not _followed:
            _followed.append(start(made))
        return made

    face.make_engine = make_followed


def _without_monitors(settings: Config) -> Config:
    names = "json_monitor csv_monitor tensorboard wandb flops_profiler comms_logger".split()
    off = {name: getattr(settings, name).model_copy(update={"enabled": False}) for name in names}
    others = {"steps_per_print": None, "wall_clock_breakdown": False, "memory_breakdown": False}
    return settings.model_copy(update=off | others)
