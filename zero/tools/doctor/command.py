"""The command `zero doctor`: prints what was found on this machine, or by all ranks under a
launcher.
"""

from __future__ import annotations

import json
import os
import socket
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

from zero.comm.communicator import Communicator, communicator
from zero.comm.world import compute_device, init_distributed
from zero.errors import UsageError
from zero.tools.arguments import Parser, judged, working
from zero.tools.doctor import checks, links, speeds
from zero.tools.doctor.checks import FAILS, SLOW, Finding, device_name
from zero.tools.estimate.speeds import default_file, read

# Ranks that do not reach each other are found after this time.
CONNECTING = timedelta(seconds=60)


def doctor(arguments: list[str]) -> int:
    """Run `zero doctor ARGUMENTS`. Returns the exit code: 1 if something would fail, else 0."""
    options = Parser("doctor").parse_args(arguments)
    if options.folder is not None and not options.folder.is_dir():
        raise UsageError(f"doctor: --folder {options.folder}: it is not a folder")
    if options.speeds is not None:
        options.speeds = Path(options.speeds or default_file())
    if options.speeds is not None and options.speeds.exists() and options.speeds.stat().st_size:
        try:
            read(options.speeds)
        except UsageError as error:
            raise UsageError(f"doctor: {error}; name a new file, or remove this one") from error
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if options.speeds is not None:
        return _speeds(options, is_alone)
    if is_alone:
        with working("doctor: checking this machine"):
            machines = {"": list(checks.findings(options.folder))}
        return _show(machines, options.json)
    try:
        init_distributed(timeout=CONNECTING)
        comm = communicator()
        machines = _machines(comm, options.folder)
        # Ranks that share a GPU, or have no backend, would hang.
        able = not any(
            finding.level == FAILS and finding.check in ("devices", "backend")
            for found in machines.values()
            for finding in found
        )
        if able:
            machines["all ranks"] = list(links.findings(links.measure(comm)))
    except RuntimeError as error:  # torch's for ranks that do not answer
        remedy = "check MASTER_ADDR, ports and firewalls; NCCL_DEBUG=INFO"
        print(Finding("links", FAILS, (str(error) or repr(error)).splitlines()[0], remedy))
        return 1
    code = _show(machines, options.json, prints=comm.rank == 0)
    # rank 0 holds the store: it may not end before the others are done
    comm.control("ending").wait_for_all()
    return code


def _speeds(options: Namespace, is_alone: bool) -> int:
    """Measure the speeds of this machine, write and print them."""
    folder = options.folder or Path.cwd()
    if not is_alone:
        init_distributed(timeout=CONNECTING)
    comm = None if is_alone else communicator()
    device = compute_device() if comm is None else comm.device
    with working() as show:
        if comm is None or comm.rank == 0:
            show("doctor: measuring matrix products, copies, disk and updates, about 20 s")
        here = speeds.measure(device, folder)
    measured = [here] if comm is None else comm.control("measured speeds").exchange(lambda: here)
    if comm is None or comm.rank == 0:
        speeds.write(options.speeds, measured, device_name(device))
        found = read(options.speeds)
        if options.json:
            print(json.dumps({"file": str(options.speeds), "speeds": vars(found)}, indent=2))
        else:
            assumed = [name for name in vars(found) if name not in {*here, "source"}]
            print(f"Written to {options.speeds}.", found, sep="\n")
            if assumed:
                print(f"Not measured, but assumed: {', '.join(assumed)}.")
    if comm is not None:
        comm.control("ending").wait_for_all()  # rank 0 holds the store
    return 0


def _machines(comm: Communicator, folder: Path | None) -> dict[str, list[Finding]]:
    """The findings of each machine, by its first rank."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    here = list(checks.findings(folder)) if first else []
    gathered = comm.control("findings").exchange(lambda: (socket.gethostname(), here))
    several = [(name, found) for name, found in gathered if found]
    return {f"{name} (machine {number})": found for number, (name, found) in enumerate(several)}


def _show(machines: dict[str, list[Finding]], as_json: bool, prints: bool = True) -> int:
    """Print all findings; returns the exit code."""
    everything = [(where, finding) for where, found in machines.items() for finding in found]
    faults = sum(finding.level == FAILS for _, finding in everything)
    slow = sum(finding.level == SLOW for _, finding in everything)
    if prints and as_json:
        listed = [{"where": where, **finding._asdict()} for where, finding in everything]
        print(json.dumps({"works": not faults, "findings": listed}, indent=2))
    elif prints:
        verdict = False if faults else None if slow else True
        print(judged(f"{faults} fault(s), {slow} thing(s) that slow training down", verdict))
        for where, found in machines.items():
            print(*filter(None, [where]), *found, sep="\n")
    return int(faults > 0)
