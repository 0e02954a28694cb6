"""The command `zero doctor`: prints what was found on this machine, or by all ranks under a
launcher.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

from zero.comm.communicator import Communicator, communicator
from zero.comm.world import init_distributed
from zero.tools.arguments import Parser, Working
from zero.tools.doctor import checks, links
from zero.tools.doctor.checks import FAILS, LEAST, OK, Finding

# Ranks that do not reach each other are found after this time.
CONNECTING = timedelta(seconds=60)


def doctor(arguments: list[str]) -> int:
    """Run `zero doctor ARGUMENTS`. Returns the exit code: 1 if something would fail, else 0."""
    parser = Parser(
        "doctor",
        "Check versions, devices, memory, compiler and disk of this machine. Under torchrun each "
        "machine is checked, "
        "and the links between all ranks are measured: torchrun --nproc_per_node 2 -m zero doctor",
        "--folder /local_nvme",
        json="the findings",
    )
    parser.add_argument(
        "--folder", type=Path, help="measure the disk of this folder, for offload to files"
    )
    options = parser.parse_args(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        with Working("doctor: looking at this machine"):
            found = list(checks.findings(options.folder))
        _show({"": found}, [], 1, options.json)
        return _code(found)
    return _of_ranks(options.folder, options.json)


def _of_ranks(folder: Path | None, as_json: bool) -> int:
    try:
        init_distributed(timeout=CONNECTING)
        comm = communicator()
        machines = _machines(comm, folder)
        found = [finding for each in machines.values() for finding in each]
        # Ranks that share a GPU, or have no backend, would hang.
        able = not any(
            finding.level == FAILS and finding.check in ("devices", "backend") for finding in found
        )
        measured = links.measure(comm) if able else []
    except RuntimeError as error:  # torch's for ranks that do not answer
        print(
            Finding(
                "links",
                FAILS,
                _first_line(error),
                "check MASTER_ADDR, ports and firewalls; NCCL_DEBUG=INFO",
            )
        )
        return 1
    about_links = list(links.findings(measured)) if measured else []
    if comm.rank == 0:
        _show(machines | {"all ranks": about_links}, measured, comm.world_size, as_json)
    comm.exchange("done")  # rank 0 holds the store: it may not end before the others are done
    return _code(found)


def _machines(comm: Communicator, folder: Path | None) -> dict[str, list[Finding]]:
    """The findings of each machine, by its first rank, and where versions differ."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    own = list(checks.findings(folder)) if first else []
    gathered = [
        (name, found) for name, found in comm.exchange((socket.gethostname(), own)) if found
    ]
    machines = {
        f"{name} (machine {number})": found for number, (name, found) in enumerate(gathered)
    }
    for package in ("python", *LEAST):
        versions = {
            finding.found
            for found in machines.values()
            for finding in found
            if finding.check == package
        }
        if len(versions) > 1:
            finding = Finding(
                package,
                FAILS,
                f"machines differ: {', '.join(sorted(versions))}",
                "install one version",
            )
            machines.setdefault("all machines", []).append(finding)
    return machines


def _code(found: list[Finding]) -> int:
    return int(any(finding.level == FAILS for finding in found))


def _show(
    groups: dict[str, list[Finding]], measured: list[links.Link], ranks: int, as_json: bool
) -> None:
    if as_json:
        listed = [
            {"where": where, **finding._asdict()}
            for where, found in groups.items()
            for finding in found
        ]
        works = not any(each["level"] == FAILS for each in listed)
        result: dict[str, Any] = {"works": works, "findings": listed}
        result["links"] = [link._asdict() for link in measured]
        print(json.dumps(result, indent=2))
        return
    for where, found in groups.items():
        if where:
            print(where)
        print(*found, sep="\n")
    if measured:
        print(links.table(measured, ranks))
    everything = [finding for found in groups.values() for finding in found]
    faults = sum(finding.level == FAILS for finding in everything)
    slow = sum(finding.level not in (OK, FAILS) for finding in everything)
    print(f"{faults} fault(s), {slow} thing(s) that make training slow")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
