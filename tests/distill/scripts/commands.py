"""Runs several command lines of run_distill.py in one process, because starting a process takes
longer than a run.

    commands.py jobs.json

A job is a list of arguments. What it pushes to the hub is copied to a folder beside its own.
Rank 0 writes `[[exit code, message], ...]` to `jobs.json.out`.
"""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub

import run_distill


def create_repo(_hub, repo_id, **_options):
    return SimpleNamespace(repo_id=repo_id)


def upload_folder(_hub, folder_path, ignore_patterns, **_options):
    shutil.copytree(
        folder_path, f"{folder_path}_on_the_hub", ignore=shutil.ignore_patterns(*ignore_patterns)
    )


def main() -> None:
    huggingface_hub.HfApi.create_repo = create_repo
    huggingface_hub.HfApi.upload_folder = upload_folder
    path = Path(sys.argv[1])
    results = []
    for arguments in json.loads(path.read_text(encoding="utf-8")):
        sys.argv = ["run_distill.py", *arguments]
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                run_distill.main()
            results.append([0, ""])
        except SystemExit as end:
            results.append([end.code, errors.getvalue().splitlines()[-1]])
    if os.environ.get("RANK", "0") == "0":
        path.with_suffix(".out").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
