"""One rank of a benchmark, in this environment or in one that has DeepSpeed:
`benchmarks.runner.ranks` starts it, and reads what it leaves.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from benchmarks.runner import REPORT_FOLDER


def main() -> None:
    module, function, task = sys.argv[1:]
    result = getattr(importlib.import_module(module), function)(**json.loads(task))
    path = Path(os.environ[REPORT_FOLDER]) / f"{int(os.environ['RANK']):04d}.json"
    path.write_text(json.dumps(result))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
