"""`zero launch`: a script on every GPU of one machine, or of the machines in a hostfile.

It starts torchrun on each machine, over ssh. The hostfile and the options are DeepSpeed's. This
file imports nothing of the engine: it runs on the machine from which jobs are started."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, TextIO

import torch

from zero.errors import UsageError
from zero.hf import STARTUP
from zero.tools.arguments import Parser, check_command, count, port, program

DEFAULT_HOSTFILE = "/job/hostfile"
# Variables that begin so reach the other machines. A file `.deepspeed_env` adds lines `NAME=VALUE`.
EXPORTED = (
    "NCCL",
    "GLOO",
    "TORCH",
    "PYTHON",
    "OMP",
    "UCX",
    "HF_",
    "MLFLOW",
    "WANDB",
    "DEEPSPEED_TIMEOUT",
    "ZERO_",
)
ENV_FILE = ".deepspeed_env"
# No machine has so many accelerators: a larger number in a hostfile is a slip of the pen.
MOST_SLOTS = 1024
_POLL = 0.1
# Seconds after a failure in which the other machines may fail by themselves: the first to end need
# not be the cause.
_LAST_WORDS = 5.0
# Seconds that they then have to end.
_GRACE = 30.0
# Seconds after which a line names the hosts that have printed nothing yet; the next one comes after
# twice the time.
_SILENCE = 5.0
# ssh gives up after three of these seconds without a sign of life. Its exit code is then 255.
_ALIVE = 15


def launch(arguments: list[str]) -> int:
    """Run `zero launch ARGUMENTS`; returns the job's exit code.

    Raises UsageError for hosts that do not exist.
    """
    options = _parser().parse(arguments)
    script = options.command[0]
    check_command("launch", ["-m"] * options.module + options.command)
    if not options.module and program(script) is not None and not Path(script).is_file():
        raise UsageError(
            f"launch: {script} is a command, not a Python script: name the script, or use --module"
        )
    if options.hostfile is None and not Path(DEFAULT_HOSTFILE).is_file():
        if options.include or options.exclude or (options.num_nodes or 1) > 1:
            raise UsageError("launch: --include, --exclude and --num_nodes need --hostfile")
        ranks = options.num_gpus or max(1, torch.accelerator.device_count())
        command = _torchrun(options, ["--standalone", "--nproc_per_node", str(ranks)])
        os.environ["PYTHONPATH"] = _python_path()
        if not options.json:
            os.execv(command[0], command)
        done = run_aside(command)
        print(json.dumps(done | {"hosts": [], "ranks": ranks}))
        return done["exit_code"]
    file = Path(options.hostfile or DEFAULT_HOSTFILE)
    hosts = choose(
        parse_hostfile(file), options.include, options.exclude, options.num_nodes, options.num_gpus
    )
    if options.elastic_training and options.min_elastic_nodes > len(hosts):
        raise UsageError(
            f"launch: --min_elastic_nodes {options.min_elastic_nodes}: {len(hosts)} hosts can be "
            "used"
        )
    return _run_on(hosts, options)


def _parser() -> Parser:
    parser = Parser(
        "launch",
        "Start a script on all GPUs of this machine, or on the machines of a hostfile, over ssh. "
        "With --json, "
        "the ranks print to stderr.",
        '--hostfile hosts --include "node1@node2:0,2" train.py --deepspeed ds_config.json',
        json="exit codes and seconds at the end",
    )
    parser.add_argument(
        "-H", "--hostfile", help=f"lines `NAME slots=N`; default: {DEFAULT_HOSTFILE} if it exists"
    )
    parser.add_argument(
        "-i",
        "--include",
        default="",
        help="hosts and slots to use: NAME[:SLOT,SLOT-SLOT][@NAME...]",
    )
    parser.add_argument(
        "-e", "--exclude", default="", help="hosts or slots not to use, written in the same way"
    )
    parser.add_argument("--num_nodes", type=count, help="use the first so many hosts")
    parser.add_argument("--num_gpus", type=count, help="use the first so many slots of each host")
    parser.add_argument(
        "--master_addr", help="address of the first host, as all hosts see it; default: its name"
    )
    parser.add_argument(
        "--master_port", type=port, default=29500, help="a free port on the first host (29500)"
    )
    parser.add_argument("--ssh_port", "--ssh-port", type=port, help="port of ssh on all hosts")
    parser.add_argument(
        "--elastic_training", action="store_true", help="go on with the hosts that are left"
    )
    parser.add_argument(
        "--min_elastic_nodes", type=count, default=1, help="fewest hosts to go on with (1)"
    )
    parser.add_argument(
        "--module", action="store_true", help="the script is a module's name, as for `python -m`"
    )
    parser.add_command()
    return parser


# -- hosts


def parse_hostfile(file: Path) -> dict[str, int]:
    """Slots by host, in the order of the file. Raises UsageError with the line that is wrong."""
    if not file.is_file():
        raise UsageError(f"{file}: no such hostfile")
    found: dict[str, int] = {}
    for number, line in enumerate(
        file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1
    ):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, slots = words[0], words[1].removeprefix("slots=") if len(words) == 2 else ""
        if not slots.isdecimal() or not int(slots):
            raise UsageError(
                f"{file}, line {number}: expected `NAME slots=N`, got {line.strip()!r}"
            )
        if int(slots) > MOST_SLOTS:
            raise UsageError(
                f"{file}, line {number}: slots={slots}: a host has at most {MOST_SLOTS} slots"
            )
        if name.startswith("-"):
            raise UsageError(
                f"{file}, line {number}: {name!r}: ssh takes a name that begins with a dash for an "
                "option; write the host's name"
            )
        if name in found:
            raise UsageError(f"{file}, line {number}: host {name} is there twice")
        found[name] = int(slots)
    if not found:
        raise UsageError(f"{file}: there is no host in it")
    return found


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
    chosen = {name: list(range(slots)) for name, slots in hosts.items()}
    named = _parse_filter(include or exclude, chosen)
    if include:
        chosen = named
    for name, slots in named.items() if exclude else ():
        chosen[name] = [slot for slot in chosen[name] if slot not in slots]
    chosen = {name: slots for name, slots in chosen.items() if slots}
    if num_nodes is not None:
        if not 0 < num_nodes <= len(chosen):
            raise UsageError(f"launch: --num_nodes {num_nodes}: {len(chosen)} hosts can be used")
        chosen = dict(list(chosen.items())[:num_nodes])
    if num_gpus is not None:
        if small := next(
            (name for name, slots in chosen.items() if len(slots) < num_gpus or num_gpus < 1), None
        ):
            raise UsageError(
                f"launch: --num_gpus {num_gpus}: host {small} has {len(chosen[small])} slots"
            )
        chosen = {name: slots[:num_gpus] for name, slots in chosen.items()}
    if not chosen:
        raise UsageError("launch: no slot is left to run on")
    return chosen


def _parse_filter(text: str, hosts: dict[str, list[int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    # Guides also write `node1:0-3,node2:0-3`.
    for part in filter(None, re.split(r"@|,(?=[^,@:]+:)", text)):
        name, colon, slots = part.partition(":")
        if name not in hosts:
            raise UsageError(
                f"launch: host {name!r} is not in the hostfile, which has {', '.join(hosts)}"
            )
        wanted = _slots(slots) if colon else hosts[name]
        if wrong := [slot for slot in wanted if slot not in hosts[name]]:
            raise UsageError(
                f"launch: {part!r}: host {name} has slots 0 to {len(hosts[name]) - 1}, not "
                f"{wrong[0]}"
            )
        found[name] = sorted({*found.get(name, []), *wanted})
    return found


def _slots(text: str) -> list[int | str]:
    """The slots of `0,2` or `0-3`; what is neither a number nor a range stays text."""
    found: list[int | str] = []
    for each in text.split(","):
        first, _, last = each.partition("-")
        numbers = first.isdecimal() and (last or first).isdecimal()
        found += range(int(first), int(last or first) + 1) if numbers else [each]
    return found


# -- commands


def _python_path() -> str:
    return os.pathsep.join(filter(None, [STARTUP, os.environ.get("PYTHONPATH")]))


def _torchrun(options: Namespace, placement: list[str]) -> list[str]:
    module = ["--module"] if options.module else []
    return [sys.executable, "-m", "torch.distributed.run", *placement, *module, *options.command]


def remote_command(options: Namespace, hosts: dict[str, list[int]], index: int) -> str:
    """The shell command for host number `index`: the working directory, variables and torchrun."""
    name, slots = list(hosts.items())[index]
    address = options.master_addr or next(iter(hosts)).rpartition("@")[2]
    placement = ["--nproc_per_node", str(len(slots)), "--tee", "3"]
    if options.elastic_training:  # any host may become the one of rank 0: the others need its name
        placement += ["--local_addr", name.rpartition("@")[2] if index else address]
        placement += [
            "--nnodes",
            f"{options.min_elastic_nodes}:{len(hosts)}",
            "--rdzv_backend",
            "c10d",
        ]
        placement += ["--rdzv_endpoint", f"{address}:{options.master_port}", "--rdzv_id", "zero"]
        placement += ["--max_restarts", "3"]
    else:
        placement += ["--nnodes", str(len(hosts)), "--node_rank", str(index)]
        placement += ["--master_addr", address, "--master_port", str(options.master_port)]
    variables = {
        key: value for key, value in os.environ.items() if key.startswith(EXPORTED)
    } | _from_env_file()
    variables["PYTHONPATH"] = _python_path()
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    if (
        options.elastic_training
    ):  # torch 2.13 would use one store for all rounds, and connect to the last one's ranks
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    words = [
        "env",
        *(f"{key}={value}" for key, value in variables.items()),
        *_torchrun(options, placement),
    ]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"


def _from_env_file() -> dict[str, str]:
    found = {}
    for folder in (Path.home(), Path.cwd()):
        if (file := folder / ENV_FILE).is_file():
            pairs = [
                line.partition("=")
                for line in file.read_text(encoding="utf-8").splitlines()
                if "=" in line
            ]
            found |= {key.strip(): value.strip() for key, _, value in pairs}
    return found


# -- the job


def run_aside(command: list[str]) -> dict[str, Any]:
    """Run a command with its output on stderr, for `--json`. SIGTERM is passed on to it.

    Returns "exit_code", "seconds", and "peak_bytes": the most host memory of one of its processes.
    """
    start = time.monotonic()
    child = subprocess.Popen(command, stdout=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends it to the child, too, whose end is waited for
    code, seconds = child.wait(), round(time.monotonic() - start, 3)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    return {"exit_code": code if code >= 0 else 128 - code, "seconds": seconds, "peak_bytes": peak}


def _run_on(hosts: dict[str, list[int]], options: Namespace) -> int:
    """Start torchrun on all hosts, print their lines, and end all when one fails.

    Returns the first failure's code.
    """
    start, ranks = time.monotonic(), sum(map(len, hosts.values()))
    print(f"zero launch: {ranks} ranks on {', '.join(hosts)}, by ssh", file=sys.stderr, flush=True)
    # A terminal (-tt) so that the remote processes get SIGHUP when the connection ends, whatever
    # ended it.
    ssh = ["ssh", "-tt", "-o", "BatchMode=yes", "-o", f"ServerAliveInterval={_ALIVE}"]
    ssh += ["-p", str(options.ssh_port)] if options.ssh_port else []
    jobs = {
        name: subprocess.Popen(
            [*ssh, name, remote_command(options, hosts, index)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )
        for index, name in enumerate(hosts)
    }  # fmt: skip
    out, silent = sys.stderr if options.json else sys.stdout, set(jobs)
    threads = [
        threading.Thread(target=_print_lines, args=(*item, out, silent), daemon=True)
        for item in jobs.items()
    ]
    for thread in threads:
        thread.start()
    fewest = options.min_elastic_nodes if options.elastic_training else len(hosts)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed: dict[str, int] = {}
    try:
        code = _wait(jobs, fewest, failed, silent)
    except KeyboardInterrupt:  # or SIGTERM
        code = 128 + signal.SIGINT
    finally:
        _end(list(jobs.values()))
        for thread in threads:
            thread.join(timeout=_GRACE)
    if options.json:
        of_hosts = [
            {"host": name, "slots": hosts[name], "exit_code": job.returncode}
            for name, job in jobs.items()
        ]
        found = {
            "exit_code": code,
            "seconds": round(time.monotonic() - start, 3),
            "ranks": ranks,
            "hosts": of_hosts,
        }
        print(json.dumps(found | {"failed_first": next(iter(failed), None)}))
    return code


def _print_lines(name: str, job: subprocess.Popen[str], out: TextIO, silent: set[str]) -> None:
    for line in job.stdout:
        silent.discard(name)
        out.write(f"[{name}] {line.rstrip()}\n")
        out.flush()


def _wait(
    jobs: dict[str, subprocess.Popen[str]], fewest: int, failed: dict[str, int], silent: set[str]
) -> int:
    """Wait until all hosts have ended, or too few are left.

    `failed` gets the codes of those that failed, in order.
    """
    deadline, start, patience = math.inf, time.monotonic(), _SILENCE
    while True:
        if silent and (waited := time.monotonic() - start) > patience:
            patience *= 2
            print(
                f"zero launch: nothing from {', '.join(sorted(silent))} in {waited:.0f} s",
                file=sys.stderr,
            )
        for name, job in jobs.items():
            if job.poll() and name not in failed:
                failed[name] = job.returncode
                print(f"zero launch: {name} ended with code {job.returncode}", file=sys.stderr)
        too_few = len(jobs) - len(failed) < fewest
        if too_few:
            deadline = min(deadline, time.monotonic() + _LAST_WORDS)
        if time.monotonic() > deadline or all(job.poll() is not None for job in jobs.values()):
            return next(iter(failed.values())) if too_few else 0
        time.sleep(_POLL)


def _end(jobs: list[subprocess.Popen[str]]) -> None:
    running = [job for job in jobs if job.poll() is None]
    for job in running:
        job.terminate()
    for job in running:
        try:
            job.wait(timeout=_GRACE)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
