"""Processes for tests: each has a time limit, and none outlives it.

    run(["python", "x.py"], timeout=60)               any command
    torchrun("x.py", nproc=2, timeout=60)             a script under torch's launcher
    fork_ranks("x.py", nproc=2, timeout=60)           the same without the launch
    run_on(2, function, argument)                     a function on each rank of a gloo group
    @on_ranks(2)                                      a test that runs on each of them

The last three fork their ranks from a server. It is a process that has already imported torch and
transformers, because these imports take ten seconds. A server answers one request at a time. It
ends when its input is closed, so also when the tests are killed. No port is chosen in advance, so
any number of tests may run at once."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import json
import os
import pickle
import random
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).resolve().parent.parent

# torch's threads in each process of a test. `tests/every_cpu.py` sets other numbers.
THREADS = os.environ.get("ZERO_TEST_THREADS", "1")

STARTING = 200.0  # seconds for a server's imports

# What each server imports. `fork_ranks` uses one of the first three, `run_on` the last one, which
# later imports the modules of the functions that it runs.
SERVERS = {
    "transformers on zero": [
        "zero.hf",
        "zero.integrations.deepspeed.engine",
        "zero.tools.run",
        "transformers",
        "peft",
        "trl",
        "distill.pipeline",
        "translation.trainer",
    ],
    "transformers": ["transformers", "peft", "trl"],
    "zero": ["zero.integrations.deepspeed.engine", "torch._dynamo"],
    "tests": [
        "pytest",
        "torch._dynamo",
        "peft",
        "bitsandbytes",
        "torchao.quantization",
        "zero.integrations.deepspeed.engine",
        "tests.dist.training",
        "tests.parity.models",
    ],
}
# transformers imports these classes only when they are used. A server imports them before it forks.
_LAZY = {
    "transformers": "AutoModelForSeq2SeqLM GPT2LMHeadModel LlamaForCausalLM Seq2SeqTrainer "
    "T5ForConditionalGeneration",
    "trl": "GRPOTrainer SFTTrainer",
}

# A launcher's variables in the shell of the tests must not reach the processes of the tests.
_LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE",
    "ACCELERATE_USE_CPU", "ACCELERATE_USE_DEEPSPEED",
)  # fmt: skip

Done = subprocess.CompletedProcess[str]


def child_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Return a child's environment: it can import this repository, has `THREADS` threads, no GPU
    and no network.
    """
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), env.get("PYTHONPATH")]))
    # Without the second, inductor starts a process for each core, which imports torch.
    threads = {"OMP_NUM_THREADS": THREADS, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return env | threads | {"CUDA_VISIBLE_DEVICES": ""} | offline | (extra or {})


# -- commands


def run(
    cmd: Sequence[str | os.PathLike],
    *,
    timeout: float,
    env: dict[str, str] | None = None,
    cwd: Any = None,
) -> Done:
    """Run a command and return its exit code, stdout and stderr. The exit code is not checked.

    `timeout` is in seconds. `env` is added to `child_environment()`. When the time is up, the
    command and all its descendants are killed. Then `TimeoutError` is raised, with the output so
    far."""
    command = [os.fspath(part) for part in cmd]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | {"stdin": subprocess.DEVNULL}
    process = subprocess.Popen(command, text=True, env=child_environment(env), cwd=cwd, **pipes)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        raise _timed_out(timeout, command, *process.communicate()) from None
    except BaseException:
        kill_tree(process.pid)
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def torchrun(
    script: str | os.PathLike, *args: str | os.PathLike, nproc: int, **others: Any
) -> Done:
    """Run `torchrun --nproc_per_node nproc script args...`. `others` go to `run`.

    For a module, `script` is "-m" and the module's name comes first in `args`.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    return run([*launcher, str(nproc), script, *args], **others)


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants, including those in sessions of their own (torchrun's
    workers).
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since the listing
                process.kill()


def _timed_out(timeout: float, what: object, stdout: str, stderr: str) -> TimeoutError:
    return TimeoutError(
        f"not finished after {timeout:g} s: {what}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
    )


# -- ranks forked from a server


def fork_ranks(
    script: str | os.PathLike,
    *args: str | os.PathLike,
    nproc: int,
    timeout: float,
    imported: str = "transformers on zero",
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
) -> Done:
    """Run a script as `torchrun` does. The first rank that fails ends the others.

    `nproc=0`: one process without a launcher. `imported`: a name in `SERVERS`. `env` takes effect
    after these imports."""
    command = [os.fspath(part) for part in (script, *args)]
    request = {
        "command": command,
        "ranks": nproc,
        "env": env or {},
        "cwd": os.fspath(cwd or os.getcwd()),
    }
    request["ends_early"] = imported == "transformers"
    with tempfile.TemporaryDirectory() as folder:
        code, stdout, stderr = _ask(imported, request, Path(folder), timeout)
    if code is None:
        raise _timed_out(timeout, command, stdout, stderr)
    return subprocess.CompletedProcess(command, code, stdout, stderr)


def run_on(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    simulated: bool = False,
    gpu: bool = False,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on each rank of a gloo group. Returns the results in the
    order of ranks.

    `fn` must be a function at the top level of a module. `simulated`: each rank has the accelerator
    of `tests.accelerator.device`. The call fails if that finds a mistake. `gpu`: each rank has a
    GPU, and the group names no backend. Otherwise ranks see no GPU. Raises `RuntimeError` with the
    traceback of the first rank that failed, or `TimeoutError` with the ranks that were not done
    after `timeout` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task").write_bytes(pickle.dumps((fn, args)))
        request = {"command": None, "ranks": world_size, "env": {}, "cwd": os.getcwd()}
        request |= {"simulated": simulated, "gpu": gpu}
        request["module"] = fn.__module__
        code, stdout, stderr = _ask("tests", request, Path(folder), timeout)
        results = [Path(folder, f"result{rank}") for rank in range(world_size)]
        missing = [rank for rank, path in enumerate(results) if not path.exists()]
        if code is None:
            raise _timed_out(timeout, f"ranks {missing}", stdout, stderr)
        if code:
            raise RuntimeError(
                f"of {world_size} ranks, {missing} failed or were ended, code "
                f"{code}:\n{stdout}{stderr}"
            )
        return [pickle.loads(path.read_bytes()) for path in results]


def on_ranks(world_size: int = 0, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Make a test of a function of (rank, world_size, ...), which `run_on` calls on each rank with
    the arguments of the test.

    Without a number of ranks here, it is the test's argument `world_size`. `options`: of `run_on`.
    """

    def decorate(fn: Callable[..., None]) -> Any:
        _, size, *others = inspect.signature(fn).parameters.values()

        @functools.wraps(fn)
        def test(**given: Any) -> None:
            args = [given[each.name] for each in others]
            run_on(world_size or given["world_size"], test, *args, **options)

        test.of_rank = fn
        test.__signature__ = inspect.Signature([*others, *([] if world_size else [size])])
        return test

    return decorate


_servers: dict[str, subprocess.Popen[str]] = {}


def _ask(
    imported: str, request: dict[str, Any], folder: Path, timeout: float
) -> tuple[int | None, str, str]:
    """Return exit code, stdout and stderr.

    After the time limit the code is None; server and ranks are killed.
    """
    # This process keeps the store open, so no other job can take its port.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    request |= {"folder": str(folder), "timeout": timeout, "port": store.port}
    outputs = [folder / "stdout", folder / "stderr"]
    for path in outputs:
        path.touch()
    server, code = _server(imported), None
    try:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        if _answers(server, timeout):
            code = int(server.stdout.readline())
    finally:
        if code is None:
            kill_tree(server.pid)
            _end(_servers.pop(imported))
    return code, *(path.read_text(encoding="utf-8", errors="replace") for path in outputs)


def _server(imported: str) -> subprocess.Popen[str]:
    if imported not in _servers:
        command = [sys.executable, "-m", "tests.processes", imported]
        environment = child_environment(
            {
                "TQDM_DISABLE": "1",
                "HF_HOME": tempfile.mkdtemp(prefix="zero-tests-"),
                # A test module may ask for a GPU when it is imported. Without this, torch asks
                # CUDA, and then no fork could use a GPU.
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                # Threads have no memory of their own, which would be used where a test has used up
                # the addresses of a process.
                "MALLOC_ARENA_MAX": "1",
            }
        )
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        atexit.register(shutil.rmtree, environment["HF_HOME"], ignore_errors=True)
        atexit.register(_end, server)
        if not _answers(server, STARTING) or server.stdout.readline() != "ready\n":
            kill_tree(server.pid)
            raise RuntimeError(f"the server of {imported!r} did not start")
        _servers[imported] = server
    return _servers[imported]


def _answers(server: subprocess.Popen[str], timeout: float) -> bool:
    return bool(select.select([server.stdout], [], [], timeout)[0])


def _end(server: subprocess.Popen[str]) -> None:
    for pipe in (server.stdin, server.stdout):
        with contextlib.suppress(OSError):
            pipe.close()
    server.wait()


# -- in the server and its forks


def _serve(imported: str) -> None:
    # A rank that wakes another one should not lose its core to it. It may hold a lock of gloo, for
    # which gloo's thread polls. Where ranks share cores, such polling can take a quarter of their
    # time; this halves it.
    with contextlib.suppress(AttributeError, OSError):  # not on this system, or not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for name in SERVERS[imported]:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            if name == "zero.hf":
                module.enable()
            for lazy in _LAZY.get(name, "").split():
                getattr(module, lazy)
    make_what_forks_inherit()
    gc.freeze()  # otherwise a collection in a fork would copy the pages of all these imports
    answers = os.dup(1)
    os.dup2(2, 1)
    os.write(answers, b"ready\n")
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if (module := request.get("module")) and module not in sys.modules:
            # Otherwise each rank would import it, which often takes longer than the test itself.
            importlib.import_module(module)
            gc.freeze()
        ranks = []
        for rank in range(max(1, request["ranks"])):
            pid = os.fork()
            if pid == 0:
                os.close(answers)
                _become_rank(rank, request)
                return
            ranks.append(pid)
        os.write(answers, f"{_wait_for(ranks)}\n".encode())


def make_what_forks_inherit() -> None:
    """Make what a process makes once, when it is first asked for. Together it takes as long as a
    short test.
    """
    if "zero" in sys.modules:
        from zero import releases
        from zero.comm.control import versions
        from zero.config import load_config
        from zero.config.table import report
        from zero.optim import adam_cpu

        adam_cpu.is_compiled()  # asks the compiler
        report(config := load_config({"train_batch_size": 1}))
        for each in (config, config.resolve(1)):
            each.model_dump()
        versions()
        releases.version = functools.cache(releases.version)  # reads a package's whole description
        releases.newer_than_tested()
    if conversions := sys.modules.get("transformers.conversion_mapping"):
        conversions.get_checkpoint_conversion_mapping("llama")


def _wait_for(ranks: list[int]) -> int:
    """Return 0, or the exit code of the first rank that failed. Then the other ranks are killed."""
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
    """Do what the request asks for. This function ends the process."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(request["folder"], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Shortly before the time limit, print where this rank is stuck.
    faulthandler.dump_traceback_later(max(1.0, request["timeout"] - 2.0))
    signal.alarm(int(request["timeout"]) + 10)  # if nobody is left to end this process
    random.seed()
    if "triton" in sys.modules:  # it prints what is not collected at the end, as what is frozen
        atexit.register(gc.unfreeze)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    try:
        if request["command"] is None:
            _call(rank, request)
        else:
            _run_script(rank, request)
            if request["ends_early"]:
                # With DDP, gloo's threads sometimes keep the interpreter from ending.
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)  # threads, or a process group with work in flight, might block a normal exit
    faulthandler.cancel_dump_traceback_later()


_kept: list[dist.ProcessGroup] = []


def _run_script(rank: int, request: dict[str, Any]) -> None:
    """Run the command as `python` would run it."""
    if request["ranks"]:
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"],
            "LOCAL_WORLD_SIZE": request["ranks"],
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": request["port"],
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }  # fmt: skip
        os.environ.update({name: str(value) for name, value in variables.items()})
        if request["ends_early"]:
            # DDP's reducer may hold the last reference to the group. Its destructor then keeps the
            # interpreter's lock and waits for gloo's thread, which waits for that lock.
            dist.init_process_group("gloo")
            _kept.append(dist.group.WORLD)
    script, *arguments = request["command"]
    if script == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *arguments]
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


def _call(rank: int, request: dict[str, Any]) -> None:
    """Call the function of `run_on` and write its result to a file."""
    folder, world_size = Path(request["folder"]), request["ranks"]
    store = dist.TCPStore("127.0.0.1", request["port"], is_master=False)
    limit, backend = timedelta(seconds=request["timeout"]), None
    if request["simulated"]:
        device = importlib.import_module("tests.accelerator.device")
        device.register()
    elif request["gpu"]:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        backend, os.environ["ACCELERATE_USE_CPU"] = "gloo", "true"
    if torch.accelerator.is_available():  # as scripts do
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), DEEPSPEED_TIMEOUT="2"
    )
    fn, args = pickle.loads((folder / "task").read_bytes())
    torch.manual_seed(0)
    result = pickle.dumps(getattr(fn, "of_rank", fn)(rank, world_size, *args))
    if request["simulated"]:
        torch.accelerator.synchronize()
        assert (found := device.mistakes()) == [], found
    dist.barrier()  # a rank that leaves early would break the connections of those still at work
    (folder / f"result{rank}").write_bytes(result)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
