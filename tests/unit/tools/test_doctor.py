"""`zero doctor` on one machine: what is missing is found and has a remedy."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zero.tools.cli import main
from zero.tools.doctor import checks, links, speeds
from zero.tools.doctor.checks import FAILS, OK, SLOW
from zero.tools.estimate.speeds import read

ROOT = Path(__file__).parents[3]


def test_what_would_fail_is_said_with_a_remedy(capsys, monkeypatch):
    monkeypatch.setitem(checks.LEAST, "torch", "99.0")
    monkeypatch.setitem(checks.LEAST, "no-such-package", "1.0")
    small = SimpleNamespace(total=64 << 20, free=60 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: small)
    monkeypatch.setattr(checks.adam_cpu, "is_compiled", lambda: False)
    monkeypatch.setenv("CXX", "no-compiler")
    with pytest.raises(SystemExit, match="1"):
        main(["doctor"])
    text = capsys.readouterr().out
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith(FAILS)}
    assert set(lines) == {"torch", "no-such-package"}
    assert lines["torch"].endswith("-> pip install 'torch>=99.0'")
    assert "missing -> pip install 'no-such-package>=1.0'" in lines["no-such-package"]
    assert text.startswith("2 fault(s), ") and max(map(len, text.splitlines())) <= 100
    assert "slow  shared memory" in text and "--shm-size" in text
    assert "no-compiler cannot build the Adam kernel" in " ".join(text.split())
    monkeypatch.setattr(checks, "accelerator", lambda: torch.device("cuda:0"))
    assert checks.shared_memory(ROOT).level == FAILS


def test_the_slowest_rank_counts(tmp_path):
    ranks = [{"memory": 3.0, "has_accelerator": True}, {"memory": 2.0, "has_accelerator": True}]
    speeds.write(tmp_path / "speeds.json", ranks, "a device")
    found = read(tmp_path / "speeds.json")
    assert found.memory == 2.0 and "by 2 processes" in found.source


def test_a_full_disk_fails(monkeypatch, tmp_path):
    full = SimpleNamespace(free=1 << 20, total=1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: full)
    disk = list(checks.findings(tmp_path))[-1]
    assert (disk.level, disk.remedy) == (FAILS, "name a folder on another disk")


def test_the_slow_link_is_named():
    found = list(links.findings({(0, 1): 10.0, (0, 2): 9.0, (1, 2): 1.0}))
    assert [(each.level, each.found) for each in found] == [
        (OK, "median 9 GB/s over 3 pair(s) of ranks"), (SLOW, "rank 1 - 2: 1 GB/s"),
    ]  # fmt: skip


def test_the_versions_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"{package}>={least}"' in text for package, least in checks.LEAST.items())
