"""`zero launch` starts a script on every GPU of one machine, or of the machines in a hostfile.

It starts torchrun on each machine, over ssh. The hostfile and the options are DeepSpeed's. This
file imports nothing of the engine: it runs on the machine from which jobs are started."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn, TextIO

from zero.errors import UsageError
from zero.integrations.hf import STARTUP
from zero.tools.arguments import Parser, check_command, numbers, program

DEFAULT_HOSTFILE = "/job/hostfile"
HERE = "localhost"  # the name of this machine in --include and --exclude, if there is no hostfile
# Variables that begin like this are sent to the other machines, and those in `.deepspeed_env`.
EXPORTED = tuple("NCCL GLOO TORCH PYTHON OMP UCX HF_ MLFLOW WANDB DEEPSPEED_TIMEOUT ZERO_".split())
ENV_FILE = ".deepspeed_env"
_POLL = 0.1
# Seconds after a failure in which the other machines may fail by themselves: the first to end need
# not be the cause.
_LAST_WORDS = 5.0
# Seconds that they then have to end.
_GRACE = 30.0
# Seconds after which ssh gives up to connect, and later after three times without a sign of life.
# Its exit code is then 255, and it names the host.
_CONNECT, _ALIVE = 30, 15

# [Note: variables] Everybody on a machine can read the command lines of its processes, so tokens
# such as HF_TOKEN may not be in them. A host prints `_READY` when it waits for its variables, and
# reads them as one line from ssh's stdin. By then its terminal no longer echoes what it is sent,
# and takes lines of any length.
_READY = "zero launch: waiting for variables"
_RECEIVE = (
    "import json, os, sys; os.environ.update(json.loads(sys.stdin.readline())); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def launch(arguments: list[str]) -> int:
    """Run `zero launch ARGUMENTS`; returns the job's exit code.

    Raises UsageError for hosts that do not exist.
    """
    options = Parser("launch").parse(arguments)
    if options.command[0] == "-m":
        options.module, options.command = True, options.command[1:] or [""]
    script = options.command[0]
    if options.module and options.no_python:
        raise UsageError("launch: give --module or --no_python, not both")
    if options.bind_core_list and not options.bind_cores_to_rank:
        raise UsageError("launch: --bind_core_list needs --bind_cores_to_rank")
    if Path(options.enable_each_rank_log).is_file():
        where = options.enable_each_rank_log
        raise UsageError(f"launch: --enable_each_rank_log {where}: a file; name a folder")
    if options.no_python and program(script) is None:
        raise UsageError(f"launch: --no_python {script}: no such command, or not executable")
    check_command("launch", ["-m"] * options.module + options.command)
    is_command = program(script) is not None and not Path(script).is_file()
    if is_command and not (options.module or options.no_python):
        raise UsageError(
            f"launch: {script} is a command, not a Python script: name the script, or use --module "
            "or --no_python"
        )
    if options.autotuning:
        raise UsageError("launch: --autotuning: zero plan writes the fastest configuration")
    if options.hostfile is None and not Path(DEFAULT_HOSTFILE).is_file():
        _run_here(options)
    hosts = choose(
        parse_hostfile(Path(options.hostfile or DEFAULT_HOSTFILE)),
        options.include,
        options.exclude,
        options.num_nodes,
        options.num_gpus,
    )
    if options.elastic_training and options.min_elastic_nodes > len(hosts):
        raise UsageError(
            f"launch: --min_elastic_nodes {options.min_elastic_nodes}: {len(hosts)} hosts can be "
            "used"
        )
    if options.no_ssh:
        _run_as_host(hosts, options)
    if options.launcher != "pdsh" or options.launcher_args:
        raise UsageError(
            "launch: --launcher and --launcher_args: ranks are started over ssh, which reads "
            "~/.ssh/config; under Slurm or MPI, start torchrun on each machine with srun or mpirun"
        )
    return _run_on(hosts, options)


# -- hosts


def parse_hostfile(file: Path) -> dict[str, int]:
    """Slots by host, in the order of the file. Raises UsageError with the line that is wrong."""
    if not file.is_file():
        raise UsageError(f"{file}: no such hostfile")
    hosts: dict[str, int] = {}
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        # ssh would take a name that begins with a dash for an option.
        found = re.fullmatch(r"([^-\s]\S*)\s+(?:slots=)?0*([1-9]\d{0,3})", text, re.ASCII)
        if found is None:
            wrong = f"expected `NAME slots=N`, got {line.strip()[:80]!r}"
        elif found[1] in hosts:
            wrong = f"host {found[1]} is listed twice"
        else:
            hosts[found[1]] = int(found[2])
            continue
        raise UsageError(f"{file}, line {number}: {wrong}")
    if not hosts:
        raise UsageError(f"{file}: it contains no hosts")
    return hosts


def choose(
    hosts: dict[str, int],
    include: str = "",
    exclude: str = "",
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> dict[str, list[int]]:
    """The slots to use, by host. `include` and `exclude` are `NAME[:SLOT,SLOT][@NAME...]`."""
    if include and exclude:
        raise UsageError("launch: give --include or --exclude, not both")
    chosen = _parse_filter(include or exclude, hosts)
    if not include:
        excluded = chosen
        chosen = {
            name: [slot for slot in range(slots) if slot not in excluded.get(name, ())]
            for name, slots in hosts.items()
        }
    chosen = {name: slots for name, slots in chosen.items() if slots}
    if (num_nodes or 0) > len(chosen):
        raise UsageError(f"launch: --num_nodes {num_nodes}: {len(chosen)} hosts can be used")
    chosen = dict(list(chosen.items())[:num_nodes])
    for name, slots in chosen.items():
        if len(slots) < (num_gpus or 0):
            raise UsageError(f"launch: --num_gpus {num_gpus}: host {name} has {len(slots)} slots")
    if not chosen:
        raise UsageError("launch: no slot is left to run on")
    return {name: slots[:num_gpus] for name, slots in chosen.items()}


def _parse_filter(text: str, hosts: dict[str, int]) -> dict[str, list[int]]:
    named: dict[str, set[int]] = {}
    # A hostfile's `user@host` is one name, although `@` also stands between names.
    for name in sorted((name for name in hosts if "@" in name), key=len, reverse=True):
        whole = rf"(?<![^@,]){re.escape(name)}(?![^@:,])"
        text = re.sub(whole, lambda found: found[0].replace("@", "\0"), text)
    # Guides also write `node1:0-3,node2:0-3`.
    for part in filter(None, re.split(r"@|,(?=[^,@:]+:)", text)):
        part = part.replace("\0", "@")
        name, colon, slots = part.partition(":")
        if name not in hosts:
            if list(hosts) == [HERE]:
                raise UsageError(
                    f"launch: host {name!r}: without --hostfile, {HERE} is the only one"
                )
            raise UsageError(
                f"launch: host {name!r} is not in the hostfile, which has {', '.join(hosts)}"
            )
        try:
            chosen = numbers(slots) if colon else range(hosts[name])
        except ArgumentTypeError as error:
            raise UsageError(f"launch: host {name}: {error}") from None
        if (most := max(chosen)) >= hosts[name]:
            raise UsageError(f"launch: host {name} has slots 0 to {hosts[name] - 1}, not {most}")
        named.setdefault(name, set()).update(chosen)
    return {name: sorted(slots) for name, slots in named.items()}


# -- commands


def python_path(present: str | None) -> str:
    """The PYTHONPATH of processes whose `deepspeed` is zero."""
    return os.pathsep.join(filter(None, [STARTUP, present]))


def _torchrun(options: Namespace, placement: list[str]) -> list[str]:
    """The arguments of Python that start the ranks of one host."""
    if (folder := options.enable_each_rank_log) != "None":
        placement = [*placement, "--redirects", "3", "--log-dir", folder]
    kind = ["--module"] * options.module + ["--no-python"] * options.no_python
    script, *arguments = options.command
    # torchrun puts the number in the place of the macro.
    local_rank = [] if options.no_local_rank else ["--local_rank=${local_rank}"]
    command = [script, *local_rank, *arguments]
    return ["-m", "torch.distributed.run", *placement, *kind, *command]


def _placement(options: Namespace, hosts: dict[str, list[int]], index: int) -> list[str]:
    """torchrun's options on host number `index`."""
    name, slots = list(hosts.items())[index]
    address = options.master_addr or next(iter(hosts)).rpartition("@")[2]
    placement = ["--nproc_per_node", str(len(slots))]
    if options.elastic_training:  # any host may become the one of rank 0: the others need its name
        placement += ["--local_addr", name.rpartition("@")[2] if index else address]
        placement += ["--nnodes", f"{options.min_elastic_nodes}:{len(hosts)}"]
        placement += ["--rdzv_backend", "c10d", "--rdzv_id", "zero", "--max_restarts", "3"]
        return [*placement, "--rdzv_endpoint", f"{address}:{options.master_port}"]
    placement += ["--nnodes", str(len(hosts)), "--node_rank", str(index)]
    return [*placement, "--master_addr", address, "--master_port", str(options.master_port)]


def remote_command(options: Namespace, hosts: dict[str, list[int]], index: int) -> str:
    """The shell command for host number `index`: the working directory and torchrun, which gets the
    variables that come over stdin.
    """
    placement = _placement(options, hosts, index)
    if options.enable_each_rank_log == "None":
        placement += ["--tee", "3"]
    torchrun = shlex.join([sys.executable, "-c", _RECEIVE, *_torchrun(options, placement)])
    source = f". {shlex.quote(options.venv_script)} && " if options.venv_script else ""
    ready = f"stty raw -echo 2>/dev/null; echo {shlex.quote(_READY)}"
    return f"cd {shlex.quote(os.getcwd())} && {source}{{ {ready}; exec {torchrun}; }}"


def variables_of_files() -> dict[str, str]:
    """The variables in the files `.deepspeed_env` of the home and the working directory."""
    variables = {}
    for file in (Path.home() / ENV_FILE, Path.cwd() / ENV_FILE):
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        pairs = (line.partition("=") for line in lines if "=" in line)
        variables |= {key.strip(): value.strip() for key, _, value in pairs}
    if variables.pop("CUDA_VISIBLE_DEVICES", None) is not None:
        text = "is ignored, because the slots of a host are chosen with --include"
        print(f"zero launch: CUDA_VISIBLE_DEVICES in {ENV_FILE} {text}", file=sys.stderr)
    return variables


def remote_variables(
    options: Namespace, slots: list[int], of_files: dict[str, str]
) -> dict[str, str]:
    """The environment variables that a host gets; those `of_files` replace the present ones."""
    variables = {key: value for key, value in os.environ.items() if key.startswith(EXPORTED)}
    variables |= of_files
    variables["PYTHONPATH"] = python_path(variables.get("PYTHONPATH"))
    variables |= _binding(options, slots)
    if options.elastic_training:
        # torch 2.13 would use one store for all rounds, and connect to the last one's ranks
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return variables


def _save_pid(options: Namespace) -> None:
    """As DeepSpeed: named after this process, which stays the one that starts the job."""
    if options.save_pid:
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(f"/tmp/{os.getpid()}.deepspeed", how, 0o644), "w") as file:
            file.write(str(os.getpid()))


def _binding(options: Namespace, slots: list[int]) -> dict[str, str]:
    """The variables that bind the ranks of a host to GPUs and cores."""
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))} if slots else {}
    if options.bind_cores_to_rank:  # read by `sitecustomize`; empty: all cores
        variables["ZERO_BIND_CORES"] = ",".join(map(str, options.bind_core_list))
    return variables


# -- the job


def _run_here(options: Namespace) -> NoReturn:
    if (options.num_nodes or 1) > 1:
        raise UsageError(f"launch: --num_nodes {options.num_nodes} needs --hostfile")
    for option in ("venv_script", "elastic_training"):
        if getattr(options, option):
            raise UsageError(f"launch: --{option} needs --hostfile")
    if options.bind_core_list:  # macOS has no such function
        missing = {*options.bind_core_list} - os.sched_getaffinity(0)
        if missing:
            core = min(missing)
            raise UsageError(f"launch: --bind_core_list: this process may not use core {core}")
    if options.no_ssh and options.node_rank > 0:
        raise UsageError(f"launch: --node_rank {options.node_rank}: without --hostfile it is 0")
    chosen = options.include or options.exclude
    if chosen and os.environ.pop("CUDA_VISIBLE_DEVICES", None) is not None:
        text = "is ignored, because --include or --exclude chooses the GPUs"
        print(f"zero launch: CUDA_VISIBLE_DEVICES {text}", file=sys.stderr)
    ranks, slots = options.num_gpus, list[int]()
    if chosen or ranks is None:
        import torch  # here: it takes seconds

        devices = torch.accelerator.device_count()
        if chosen:
            # Without a GPU, a slot is a core.
            here = {HERE: devices or os.cpu_count() or 1}
            slots = choose(here, options.include, options.exclude, None, ranks)[HERE]
        ranks = len(slots) or max(1, devices)
    os.environ |= _binding(options, slots)
    _become(options, ["--standalone", "--nproc_per_node", str(ranks)])


def _run_as_host(hosts: dict[str, list[int]], options: Namespace) -> NoReturn:
    """Start the ranks of the host that this machine is."""
    if not 0 <= (index := options.node_rank) < len(hosts):
        raise UsageError(
            f"launch: --no_ssh needs --node_rank, the number of this host: 0 to {len(hosts) - 1}"
        )
    os.environ.update(_binding(options, list(hosts.values())[index]))
    _become(options, _placement(options, hosts, index))


def _become(options: Namespace, placement: list[str]) -> NoReturn:
    """Become torchrun."""
    _save_pid(options)
    os.environ["PYTHONPATH"] = python_path(os.environ.get("PYTHONPATH"))
    os.execv(sys.executable, [sys.executable, *_torchrun(options, placement)])


def _run_on(hosts: dict[str, list[int]], options: Namespace) -> int:
    """Start torchrun on all hosts, print their lines, and end all when one fails.

    Returns the first failure's code.
    """
    _save_pid(options)
    of_files = variables_of_files()
    variables = {name: remote_variables(options, slots, of_files) for name, slots in hosts.items()}
    is_quiet = options.quiet or options.log_level not in ("debug", "info")
    if not is_quiet:
        where, ranks = ", ".join(hosts), sum(map(len, hosts.values()))
        print(f"zero launch: {ranks} ranks on {where}, by ssh", file=sys.stderr, flush=True)
    # A terminal (-tt) so that the remote processes get SIGHUP when the connection ends, whatever
    # ended it.
    ssh = ["ssh", "-tt", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT}"]
    ssh += ["-o", f"ServerAliveInterval={_ALIVE}"]
    ssh += ["-p", str(options.ssh_port)] if options.ssh_port else []
    jobs = {
        name: subprocess.Popen(
            [*ssh, name, remote_command(options, hosts, index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for index, name in enumerate(hosts)
    }
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="replace")  # not every terminal can show a progress bar

    def talk(name: str, sent: IO[str], received: IO[str]) -> None:
        """Give a host its variables, and print its lines.

        It reads them whatever happens, because ranks whose lines nobody reads block.
        """
        for line in received:
            if line.rstrip() == _READY:
                with suppress(BrokenPipeError), sent:  # ssh has ended, which `_wait` notices
                    sent.write(json.dumps(variables[name]) + "\n")
                continue
            try:
                out.write(f"[{name}] {line.rstrip()}\n")
                out.flush()
            except OSError as error:  # as in `zero launch ... | head`
                _discard(out)
                print(f"zero launch: the output of the hosts is lost: {error}", file=sys.stderr)

    threads = [
        threading.Thread(target=talk, args=(name, job.stdin, job.stdout), daemon=True)
        for name, job in jobs.items()
    ]
    fewest = options.min_elastic_nodes if options.elastic_training else len(hosts)
    try:
        # Before the first line is shown, so that whoever waits for it may interrupt.
        signal.signal(signal.SIGTERM, _interrupt)
        for thread in threads:
            thread.start()
        code = _wait(jobs, fewest)
    except KeyboardInterrupt as interrupt:  # its argument is the signal, if that is not SIGINT
        code = 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    finally:
        end([job for job in jobs.values() if job.poll() is None], _GRACE)
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join(timeout=_GRACE)
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _discard(out: TextIO) -> None:
    """From now on, what is written to `out` goes nowhere, and raises nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, out.fileno())
    os.close(nowhere)


def _wait(jobs: dict[str, subprocess.Popen[str]], fewest: int) -> int:
    """Wait until all hosts have ended, or fewer than `fewest` are left. Returns the first failure's
    code.
    """
    deadline, failed = math.inf, dict[str, int]()
    while True:
        for name, job in jobs.items():
            if job.poll() and name not in failed:
                code = job.returncode
                failed[name] = code if code >= 0 else 128 - code  # as a shell reports a signal
                print(f"zero launch: {name} ended with code {failed[name]}", file=sys.stderr)
        too_few = len(jobs) - len(failed) < fewest
        if too_few:
            deadline = min(deadline, time.monotonic() + _LAST_WORDS)
        if time.monotonic() > deadline or all(job.poll() is not None for job in jobs.values()):
            return next(iter(failed.values())) if too_few else 0
        time.sleep(_POLL)


def end(jobs: Sequence[subprocess.Popen], grace: float) -> None:
    """End what still runs. It gets `grace` seconds, in which a launcher ends its ranks."""
    for job in jobs:
        job.terminate()
    for job in jobs:
        try:
            job.wait(timeout=grace)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
