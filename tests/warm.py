"""Scripts on several ranks without the launch: the ranks are forks of a process that has imported transformers.

A rank under torchrun takes ten seconds of a core for its imports, which is longer than most of these scripts run. What
is tested of the launch itself, of signals and of failing ranks is tested under torchrun; see `tests/launch.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import random
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.launch import kill_tree, test_environment

STARTING = 200.0  # seconds for the imports

_servers: dict[str, subprocess.Popen[str]] = {}


def warm_ranks(
    script: str | os.PathLike[str],
    *args: str | os.PathLike[str],
    nproc: int,
    timeout: float,
    imported: str = "transformers on zero",
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """As `launch.torchrun`; the first rank that fails ends the others. `nproc=0`: one process without a launcher.

    `imported` names what the process has imported: "transformers on zero", after `zero.hf.enable()`; "transformers",
    without zero; "zero" alone. It reads `env` later than a new process would, after these imports.
    """
    command = [os.fspath(part) for part in (script, *args)]
    # The store lives here, so there is no moment when another job could take its port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "command": command, "nproc": nproc, "port": store.port, "timeout": timeout, "folder": folder,
            "env": env or {}, "cwd": os.fspath(cwd or os.getcwd()),
        }  # fmt: skip
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        code = _ask(imported, request)
        stdout, stderr = (path.read_text(encoding="utf-8") for path in outputs)
    if code is None:
        raise TimeoutError(f"not finished after {timeout:g} s: {command}\n--- stdout\n{stdout}\n--- stderr\n{stderr}")
    return subprocess.CompletedProcess(command, code, stdout, stderr)


def _ask(imported: str, request: dict[str, Any]) -> int | None:
    """The exit code, or None after the time limit; then, and after an exception, the server is gone with its ranks."""
    server, code = _server(imported), None
    try:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        if _answers(server, request["timeout"]):
            code = int(server.stdout.readline())
    finally:
        if code is None:
            kill_tree(server.pid)
            _end(_servers.pop(imported))
    return code


def _server(imported: str) -> subprocess.Popen[str]:
    if imported not in _servers:
        command = [sys.executable, "-m", "tests.warm", imported]
        environment = test_environment({"TQDM_DISABLE": "1", "HF_HOME": tempfile.mkdtemp(prefix="zero-tests-")})
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        atexit.register(shutil.rmtree, environment["HF_HOME"], ignore_errors=True)
        atexit.register(_end, server)
        if not _answers(server, STARTING) or server.stdout.readline() != "ready\n":
            kill_tree(server.pid)
            raise RuntimeError("the process that imports transformers did not start")
        _servers[imported] = server
    return _servers[imported]


def _answers(server: subprocess.Popen[str], timeout: float) -> bool:
    return bool(select.select([server.stdout], [], [], timeout)[0])


def _end(server: subprocess.Popen[str]) -> None:
    """It ends with its input, as it does if this process is killed."""
    for pipe in (server.stdin, server.stdout):
        with contextlib.suppress(OSError):
            pipe.close()
    server.wait()


# -- the server


def _import_all(imported: str) -> None:
    if imported == "zero":
        import zero  # noqa: F401

        return
    if imported == "transformers on zero":
        import zero.hf

        zero.hf.enable()
        import distill.pipeline  # noqa: F401
        import translation.trainer  # noqa: F401
    with contextlib.suppress(ImportError):
        import peft  # noqa: F401
    with contextlib.suppress(ImportError):
        from trl import GRPOTrainer, SFTTrainer  # noqa: F401
    from transformers import (  # noqa: F401
        AutoModelForSeq2SeqLM,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        Seq2SeqTrainer,
        T5ForConditionalGeneration,
    )


def _serve(imported: str) -> None:
    _import_all(imported)
    answers = os.dup(1)
    os.dup2(2, 1)
    os.write(answers, b"ready\n")
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        ranks = []
        for rank in range(max(1, request["nproc"])):
            pid = os.fork()
            if pid == 0:
                os.close(answers)
                _become_rank(rank, request)
                return
            ranks.append(pid)
        os.write(answers, f"{_wait_for(ranks)}\n".encode())


def _wait_for(ranks: list[int]) -> int:
    """0, or the exit code of the first that failed, after which the others are killed."""
    code = 0
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return code


def _become_rank(rank: int, request: dict[str, Any]) -> None:
    """Run the command as `python` would run it; leaving this function ends the process."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(request["folder"], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Just before the tests give up, show where this rank is stuck.
    faulthandler.dump_traceback_later(max(1.0, request["timeout"] - 2.0))
    signal.alarm(int(request["timeout"]) + 10)  # nobody may be left to end this process
    random.seed()
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    if request["nproc"]:
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["nproc"], "LOCAL_WORLD_SIZE": request["nproc"],
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": request["port"], "TORCHELASTIC_USE_AGENT_STORE": True,
        }  # fmt: skip
        os.environ.update({name: str(value) for name, value in variables.items()})
    script, *arguments = request["command"]
    try:
        if script == "-m":
            sys.argv = arguments
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [script, *arguments]
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)  # threads, and a process group with work in flight, may never come to an end
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _serve(sys.argv[1])
