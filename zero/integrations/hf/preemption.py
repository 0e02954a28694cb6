"""Lets a Trainer save a checkpoint when it gets SIGTERM, so that the same command can continue from
there.

trainer.add_callback(SaveOnSigterm())
trainer.train(resume_from_checkpoint=find_resumable(args.output_dir))
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from zero.checkpoint.preemption import EXIT_CODE, SigtermWatch
from zero.checkpoint.training import wait_for_background_saves


class SaveOnSigterm(TrainerCallback):
    """A callback for the Trainer that saves a checkpoint and stops when any rank gets SIGTERM.

    The current step is finished first. The checkpoint is an ordinary one of the Trainer, and all
    ranks exit with code 143. Your scheduler must leave enough time for one step and one save before
    it kills the job; under torchrun, `--shutdown-timeout` sets how many seconds (default: 30)."""

    def __init__(self) -> None:
        self.watch: SigtermWatch | None = None
        self._stopping = False

    def _seen(self) -> bool:
        """Whether any rank has received SIGTERM; all ranks must call this."""
        return self.watch is not None and self.watch.seen()

    def on_train_begin(self, *_: Any, **others: Any) -> None:
        self.watch = SigtermWatch()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **others: Any) -> None:
        if self._seen():
            self._stopping = control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **others: Any) -> None:
        if not self._stopping:
            return
        wait_for_background_saves()
        # Wait for all ranks: if one ended now, the launcher would stop rank 0, which writes the
        # Trainer's own files.
        self._seen()
        if args.process_index == 0:
            folder = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            print(
                f"zero: SIGTERM: stopped after step {state.global_step}; the checkpoint {folder} "
                "is complete; the same command continues from there",
                file=sys.stderr,
                flush=True,
            )
        sys.exit(EXIT_CODE)

    def on_train_end(self, *_: Any, **others: Any) -> None:
        if self.watch is not None:
            self.watch.close()
