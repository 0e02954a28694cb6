"""`zero launch` on two hosts. Both are this machine, under two addresses, and a shell replaces ssh.

`tests/dist/comm/test_hosts.py` has real ssh.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.processes import REPOSITORY, Done, fork_ranks
from zero.errors import UsageError
from zero.integrations.hf import STARTUP
from zero.tools.arguments import Parser
from zero.tools.launch import (
    choose,
    launch,
    parse_hostfile,
    remote_command,
    remote_variables,
    variables_of_files,
)

HOSTS = ("127.0.0.1", "127.0.0.2")
# Each rank prints its numbers. With "fail", rank 1 fails. The others notice nothing: somebody must
# end them.
SCRIPT = """
import os, psutil, sys, time, torch, torch.distributed as dist
assert sys.argv.pop(1) == f"--local_rank={os.environ['LOCAL_RANK']}"
dist.init_process_group("gloo")
rank = dist.get_rank()
if sys.argv[1] == "fail":
    dist.barrier()
    sys.exit(7) if rank == 1 else time.sleep(600)
total = torch.ones(())
dist.all_reduce(total)
slots = os.environ["CUDA_VISIBLE_DEVICES"]
local, told = os.environ["LOCAL_RANK"], os.environ["NCCL_TOLD"]
print(f"rank {rank} of {int(total)} local {local} slots {slots} told {told}")
token, notes = os.environ["HF_TOKEN"], os.environ["WANDB_NOTES"]
lines = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
print("token in", sum(token in word for words in lines for word in words), "notes", len(notes))
dist.destroy_process_group()  # else a thread of gloo may end the process with an error
"""
# A secret, and a variable that is longer than a line of a terminal may be.
TOKEN, LONG = "hf_secret", 9000
# As ssh does, it stays, with the command in its command line, until the command has ended, which
# gets no variables but those that it sets itself.
SHELL = """#!/bin/sh
for command; do :; done
exec 3<&0
env -i PATH="$PATH" sh -c "$command" <&3 &
trap 'kill $!' TERM
wait $!
"""
HUGE = "1" + 5000 * "0"  # more digits than int() takes


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which the command `ssh` reaches both hosts."""
    command = tmp_path / "bin" / "ssh"
    command.parent.mkdir()
    command.write_text(SHELL)
    command.chmod(0o700)
    variables = {"NCCL_TOLD": "two words", "HF_TOKEN": TOKEN, "WANDB_NOTES": "x" * LONG}
    return {"PATH": f"{command.parent}:{os.environ['PATH']}", **variables}


def job(folder: Path, what: str, environment: dict[str, str]) -> Done:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "hosts").write_text(f"# two\n{HOSTS[0]} slots=2\n\n{HOSTS[1]} slots=4  # more\n")
    options = ["--hostfile", folder / "hosts", "--include", f"{HOSTS[0]}:1@{HOSTS[1]}:0,3"]
    options += ["--master_addr", HOSTS[0], "--master_port", str(free_port())]
    command = ("-m", "zero", "launch", *options, folder / "script.py", what)
    others = {"nproc": 0, "timeout": 120, "imported": "zero", "cwd": REPOSITORY}
    return fork_ranks(*command, env=environment, **others)


def left_over(folder: Path) -> list[psutil.Process]:
    script = str(folder / "script.py")
    return [
        each for each in psutil.process_iter(["cmdline"]) if script in (each.info["cmdline"] or ())
    ]


def test_ranks_on_two_hosts_work_together(environment: dict[str, str], tmp_path: Path):
    done = job(tmp_path, "work", environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        f"[{HOSTS[0]}] [default0]:rank 0 of 3 local 0 slots 1 told two words",
        f"[{HOSTS[1]}] [default0]:rank 1 of 3 local 0 slots 0,3 told two words",
        f"[{HOSTS[1]}] [default1]:rank 2 of 3 local 1 slots 0,3 told two words",
    ):
        assert line in done.stdout.splitlines(), done.stdout
    # Neither a list of processes nor the output shows what only the job may know.
    assert done.stdout.count(f"token in 0 notes {LONG}") == 3, done.stdout
    assert TOKEN not in done.stdout + done.stderr


def test_all_hosts_end_when_one_fails(environment: dict[str, str], tmp_path: Path):
    done = job(tmp_path, "fail", environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith(f"zero launch: 3 ranks on {HOSTS[0]}, {HOSTS[1]}, by ssh\n")
    assert f"zero launch: {HOSTS[1]} ended with code 1" in done.stderr
    deadline = time.monotonic() + 30
    while left_over(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_over(tmp_path) == []


def test_what_a_recorder_asks_for_reaches_all_hosts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ZERO_RECORDER_FOLDER", "/shared/a b")
    monkeypatch.setenv("UNRELATED", "x")
    options = Parser("launch").parse(["--elastic_training", "--min_elastic_nodes", "2", "train.py"])
    command = shlex.split(remote_command(options, {"a": [0], "user@b": [0, 1]}, 1))
    variables = remote_variables(options, [0, 1], {"PYTHONPATH": "/of/file"})
    assert variables["ZERO_RECORDER_FOLDER"] == "/shared/a b" and "UNRELATED" not in variables
    assert variables["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert variables["PYTHONPATH"] == f"{STARTUP}:/of/file"
    assert command[command.index("--nnodes") + 1] == "2:2"
    assert command[command.index("--local_addr") + 1] == "b"
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_slots_in_a_file_of_variables_are_ignored_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("A = 1\nCUDA_VISIBLE_DEVICES=7\n")
    assert variables_of_files() == {"A": "1"}
    assert "CUDA_VISIBLE_DEVICES in .deepspeed_env is ignored" in capsys.readouterr().err


@contextmanager
def start_with(folder: Path, ssh: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start `zero launch` on one host, with a shell script in the place of ssh."""
    (folder / "train.py").write_text("")
    (folder / "hosts").write_text("a slots=1\n")
    (folder / "ssh").write_text(f"#!/bin/sh\n{ssh}\n")
    (folder / "ssh").chmod(0o700)
    arguments = ["--hostfile", folder / "hosts", folder / "train.py"]
    with subprocess.Popen(
        [sys.executable, "-m", "zero", "launch", *arguments],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        # Tests that run in the background of a shell inherit that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_closed_output_does_not_hang_the_job(tmp_path: Path):
    ssh = "yes | head -n 100000; touch $(dirname $0)/ended; kill -TERM $$"
    with start_with(tmp_path, ssh) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"[a] y\n"
        process.stdout.close()
        assert process.wait(timeout=60) == 143  # as a shell says that a signal ended the host
        assert process.stderr.read().count(b"the output of the hosts is lost: [Errno 32]") == 1
    assert (tmp_path / "ended").exists()


def test_what_a_terminal_cannot_show_does_not_hang_the_job(tmp_path: Path):
    ssh = "printf '\\342\\226\\210\\n'; yes | head -n 100000"
    with start_with(tmp_path, ssh, PYTHONIOENCODING="ascii", PYTHONUTF8="1") as process:
        out, _ = process.communicate(timeout=60)
    lines = out.splitlines()
    assert (process.returncode, len(lines), lines[0], lines[-1]) == (0, 100_001, b"[a] ?", b"[a] y")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_with_a_shells_codes(tmp_path: Path, number: int, code: int):
    with start_with(tmp_path, "echo up; exec sleep 600") as process:
        assert process.stdout is not None and process.stdout.readline() == b"[a] up\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == code


# The options of DeepSpeed's launcher, 0.19.8 (`deepspeed --help`), with values.
OF_DEEPSPEED = """
-H hosts --hostfile hosts -i localhost --include localhost -e x --exclude x --num_nodes 2
--num_nodes -1 --num_gpus 2 --num_gpus -1 --num_accelerators 2 --master_port 29501 --master_addr x
--node_rank 0 --launcher PDSH --launcher_args=-v --module --no_python --no_local_rank --no_ssh
--no_ssh_check --force_multi --save_pid --enable_each_rank_log logs --autotuning tune
--bind_cores_to_rank --bind_core_list 0,2-5 --ssh_port 22 --venv_script activate --log_level debug
-q --quiet
"""


@pytest.mark.parametrize("option", re.split(r"\s(?=-[^1])", OF_DEEPSPEED.strip()))
def test_each_option_of_deepspeeds_launcher_is_known(option: str):
    options = Parser("launch").parse([*option.split(), "train.py", "--local_rank", "3"])
    assert options.command == ["train.py", "--local_rank", "3"]


def test_what_options_of_deepspeed_mean():
    parse = Parser("launch").parse
    assert parse(["--num_gpus", "-1", "--num_nodes", "-1", "x.py"]).num_gpus is None
    assert parse(["--bind_core_list", "0,2-4", "x.py"]).bind_core_list == [0, 2, 3, 4]
    for wrong in (["--bind_core_list", "0-"], ["--launcher", "x"], ["--num_gpus", "-2"]):
        with pytest.raises(UsageError, match=wrong[0]):
            parse([*wrong, "x.py"])
    logs = parse(["--enable_each_rank_log", "logs", "--venv_script", "a b", "--no_python", "x"])
    command = shlex.split(remote_command(logs, {"a": [0], "b": [0]}, 0))
    assert command[3:6] == [".", "a b", "&&"] and "--tee" not in command
    assert command[command.index("--log-dir") + 1] == "logs" and "--no-python" in command


HERE_SCRIPT = """
import os, sys
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"
cores = os.sched_getaffinity(0)
print(" ".join([*map(os.environ.get, names), *sys.argv[1:], str(len(cores))]))
"""


def test_ranks_on_this_machine_alone(tmp_path: Path):
    (tmp_path / "x.py").write_text(HERE_SCRIPT)
    core = str(min(os.sched_getaffinity(0)))
    words = ["-i", "localhost:0", "--bind_cores_to_rank", "--bind_core_list", core]
    done = fork_ranks(
        "-m", "zero", "launch", *words, tmp_path / "x.py", "x", nproc=0, timeout=60,
        imported="zero", cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": "5"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["0 1 0 0 --local_rank=0 x 1"], done.stderr
    assert done.returncode == 0 and "CUDA_VISIBLE_DEVICES is ignored" in done.stderr


def test_without_ssh_a_host_starts_its_own_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def become(_: str, command: list[str]) -> None:
        started.append(command)
        raise SystemExit

    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(os, "execv", become)
    started: list[list[str]] = []
    (tmp_path / "hosts").write_text("a slots=1\nuser@b slots=3\n")
    (tmp_path / "x.py").write_text("")
    words = ["--hostfile", str(tmp_path / "hosts"), "--no_ssh", "--node_rank", "1"]
    with pytest.raises(SystemExit):
        launch([*words, "--exclude", "user@b:0", str(tmp_path / "x.py")])
    (command,) = started
    assert command[1:11] == [
        *("-m", "torch.distributed.run", "--nproc_per_node", "2", "--nnodes", "2"),
        *("--node_rank", "1", "--master_addr", "a"),
    ]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert os.environ["PYTHONPATH"].startswith(STARTUP)


# -- hosts


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, {"a": [0, 1, 2, 3], "b": [0, 1], "me@c": [0, 1]}),
        ({"include": "me@c@a:3,1"}, {"me@c": [0, 1], "a": [1, 3]}),
        ({"exclude": "b@a:0-2"}, {"a": [3], "me@c": [0, 1]}),
        ({"exclude": "a,b:0,me@c:0-1"}, {"b": [1]}),
        ({"num_nodes": 2, "num_gpus": 1}, {"a": [0], "b": [0]}),
    ],
    ids=str,
)
def test_slots_are_chosen_as_deepspeed_does(options: dict, chosen: dict):
    """A host with a user is chosen by its whole name."""
    assert choose({"a": 4, "b": 2, "me@c": 2}, **options) == chosen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "d"}, "host 'd' is not in the hostfile, which has a, b"),
        ({"exclude": "b:2"}, "host b has slots 0 to 1, not 2"),
        ({"include": "b:1-0"}, "host b: 1-0: a range ends before it begins"),
        ({"include": "a:x"}, "host a: x is not a list of numbers"),
        ({"include": "a", "exclude": "b"}, "not both"),
        ({"exclude": "a@b"}, "no slot is left"),
        ({"num_nodes": 3}, "2 hosts can be used"),
        ({"num_gpus": 3}, "host b has 2 slots"),
    ],
)
def test_wrong_choices_are_refused(options: dict, message: str):
    with pytest.raises(UsageError, match=message):
        choose({"a": 4, "b": 2}, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=x", "line 1: expected"),
        ("a slots=1\na slots=2", "line 2: host a is listed twice"),
        ("a slots=1\n-oProxyCommand=x slots=1", "line 2: expected"),
        (f"a slots={HUGE}", "line 1: expected .*slots=1000"),
    ],
)
def test_wrong_hostfiles_are_refused(tmp_path: Path, text: str, message: str):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        parse_hostfile(file)
