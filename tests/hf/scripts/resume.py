"""The jobs of `jobs.py`, some of which are ended, for `test_resume.py`. Only `sigterm_at` needs
anything of zero. It is one more key of a job:

    sigterm_at  the launcher gets SIGTERM while that step begins; the Trainer has a `SaveOnSigterm`
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import jobs
from transformers import TrainerCallback


class TerminateLauncher(TrainerCallback):
    """Sends SIGTERM to the launcher, as a scheduler does.

    The step waits until this rank has got the signal too.
    """

    def __init__(self, step: int, answer: Any):
        self.step, self.answer = step, answer

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step and os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGTERM)
            while not self.answer.watch.received:
                time.sleep(0.01)


def callbacks(job: dict) -> list[TrainerCallback]:
    if "sigterm_at" in job:
        from zero.integrations.hf.preemption import SaveOnSigterm

        answer = SaveOnSigterm()
        return [answer, TerminateLauncher(job["sigterm_at"], answer)]
    return []


if __name__ == "__main__":
    jobs.main(callbacks)
