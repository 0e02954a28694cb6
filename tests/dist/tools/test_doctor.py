"""`zero doctor` under a launcher: the ranks measure the links between them, and one prints."""

from __future__ import annotations

import json

from tests.processes import fork_ranks

RANKS = 3


def test_ranks_measure_all_links():
    done = fork_ranks("-m", "zero", "doctor", "--json", nproc=RANKS, timeout=120, imported="zero")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    links = next(each["found"] for each in found["findings"] if each["check"] == "links")
    assert links.endswith(" over 3 pair(s) of ranks")
    torch = [each for each in found["findings"] if each["check"] == "torch"]
    assert len(torch) == 1 and torch[0]["where"].endswith("(machine 0)")
    assert "for each of 3 ranks" in next(
        each["found"] for each in found["findings"] if each["check"] == "host memory"
    )


def test_all_ranks_measure_speeds_and_one_writes_them(tmp_path):
    file = tmp_path / "speeds.json"
    options = "--json", "--speeds", str(file), "--folder", str(tmp_path)
    done = fork_ranks("-m", "zero", "doctor", *options, nproc=2, timeout=240, imported="zero")
    assert done.returncode == 0, done.stdout + done.stderr
    speeds = json.loads(file.read_text())["speeds"]
    assert json.loads(done.stdout)["speeds"] | speeds == json.loads(done.stdout)["speeds"]
    assert speeds["network"] > 0 and "by 2 processes" in speeds["source"]
