"""One rank's exception ends all ranks with that rank's message."""

from __future__ import annotations

from tests.processes import torchrun

# The failing rank has a thread that never ends, and the other rank waits in a collective. So the
# time limit tests.
SCRIPT = """
import os, threading, zero
from tests.dist.toys import toy, toy_batches
from tests.dist.training import ds_config, start

engine, _ = start(toy(), ds_config())
threading.Thread(target=threading.Event().wait).start()
for number, batch in enumerate(toy_batches(3)):
    engine.backward(engine(**batch))
    if number == 1 and os.environ["RANK"] == "1":
        raise RuntimeError("the batch was cursed")
    engine.step()
"""


def test_one_rank_raising_in_a_step_ends_the_job(tmp_path):
    script = tmp_path / "cursed.py"
    script.write_text(SCRIPT)
    process = torchrun("-m", "zero", "run", script, nproc=2, timeout=90)
    assert process.returncode != 0
    assert "[rank 1] RuntimeError: the batch was cursed" in process.stderr
    assert f'File "{script}", line 11' in process.stderr  # the traceback, too
