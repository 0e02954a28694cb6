"""`zero adopt` and `zero convert` write a folder as a whole or not at all, and name what is wrong
with a command line."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from zero.conversion import ours
from zero.tools.cli import main

DEEPSPEED = Path(__file__).parents[2] / "fixtures" / "deepspeed" / "llama-3"


def test_after_a_kill_the_same_command_works(tmp_path: Path) -> None:
    command = ["adopt", str(DEEPSPEED), str(tmp_path / "out")]
    if (child := os.fork()) == 0:
        ours.copy_beside = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        main(command)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".unfinished-out"]
    main(command)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"global_step3", "latest", "zero_to_fp32.py"}


@pytest.mark.parametrize("to", ["deepspeed", "dcp", "hf"])
def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, to, monkeypatch, capsys) -> None:
    main(["adopt", str(DEEPSPEED), str(tmp_path / "zero")])
    out = tmp_path / "out"
    # The file system refuses to let files grow, as if it were full.
    resource = pytest.importorskip("resource")
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr("zero.conversion.named.on_disk", lambda tensors, _: dict(tensors))
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, former[1]))
    try:
        with pytest.raises(SystemExit, match="2"):
            main(["convert", str(tmp_path / "zero"), "--to", to, str(out)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert capsys.readouterr().err.splitlines() == [f"zero: {out}: File too large"]
    assert [path.name for path in tmp_path.iterdir()] == ["zero"]


def test_wrong_folders_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(DEEPSPEED, tmp_path / "job" / "checkpoint-3")
    commands = {
        f"adopt {folder.parent}": f"name one of them, such as {folder}",
        f"adopt {folder} {folder}/new": f"inside of {folder}",
        f"convert {folder} --to hf": f"{folder} is of another engine",
        f"convert {folder} --to hf --ranks 2": "--ranks is for DeepSpeed",
    }
    for command, message in commands.items():
        with pytest.raises(SystemExit, match="2"):
            main(command.split())
        assert re.search(message, capsys.readouterr().err), command
    main(["adopt", str(folder / "global_step3")])
    assert {path.name for path in folder.parent.iterdir()} == {"checkpoint-3", "checkpoint-3-zero"}
    (folder / "latest").unlink()
    with pytest.raises(SystemExit, match="2"):
        main(["adopt", str(folder), str(tmp_path / "out")])
    assert f"such as {folder}/global_step3" in capsys.readouterr().err
