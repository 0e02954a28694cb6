"""TRL's distillation trainers, one after the other, and where each one's teacher is.

`python teachers.py FOLDER LINES.json`: the file has the command line of each trainer by its name.
Every rank writes `FOLDER/NAME/rankN.json`, and saves the student beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.compatibility.on_policy import make
from zero.engine import ZeroEngine
from zero.offload import tiers


def held(teacher: object) -> dict[str, int]:
    """Return how many bytes of the teacher this rank has in a file and in memory, besides weights
    that are whole on every rank.
    """
    found = {"file": 0, "memory": 0}
    for group in teacher.groups if isinstance(teacher, ZeroEngine) else []:
        if not group.persistent:
            place = "file" if group.tier.holds_in_file(group.shard) else "memory"
            found[place] += group.shard.nbytes
    return found


def main() -> None:
    folder, lines = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    # Even the weights of a tiny teacher go to files.
    tiers.LEAST_BYTES_IN_A_FILE = 1
    for name, line in lines.items():
        out = folder / name
        trainer: Any = make(name, [*line, "--output_dir", str(out)])
        trainer.train()
        trainer.save_model(str(out))
        report = {"log": trainer.state.log_history, "teacher": held(trainer.teacher_model)}
        (out / f"rank{trainer.args.process_index}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
