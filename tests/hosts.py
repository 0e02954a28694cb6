"""Hosts on one machine: each has its own network, name, processes and sshd. A switch joins them.

    with hosts(2, folder, rate="200mbit") as (first, second):
        run(first.command("ssh", second.name, "hostname"), timeout=60)

They are Linux namespaces. No namespace has a name outside, and each ends with the process that
holds it, which ends with this one. So nothing is left over, even if the tests are killed. The disk
is shared."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc", "ssh", "ssh-keygen")
PORT = 2222  # of each sshd
KINDS = ("--net", "--mount", "--uts", "--pid")
INTERFACE = "fabric0"

# Runs as the first process of a host. The folder's files cover the machine's own ones, in this host
# only.
START_HOST = """
set -e
hostname {name}
ip link set lo up
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount --bind {folder}/{name}.hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
echo ready
exec {sshd} -D -e -f {folder}/sshd_config
"""
SSHD_CONFIG = """
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PidFile none
"""
SSH_CONFIG = """
Host *
IdentityFile {folder}/user
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
ServerAliveCountMax 1
"""


@dataclass
class Host:
    name: str
    address: str
    # The process that holds its namespaces, and the first process in them.
    holder: subprocess.Popen[str]
    first: int

    def command(self, *words: str | os.PathLike) -> list[str]:
        """A command that runs `words` on this host, in the folder of this process."""
        enter = ["nsenter", "--target", str(self.first), "--all", f"--wd={os.getcwd()}", "--"]
        return [*enter, *map(os.fspath, words)]

    def set_link(self, state: str) -> None:
        """`down` is what a pulled cable does: no process is told, nothing is answered."""
        _do(self.command("ip", "link", "set", INTERFACE, state))

    def kill(self) -> None:
        """End all its processes, as a power cut would do."""
        _end(self.holder)


@functools.cache
def why_not() -> str | None:
    """Why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "hosts need the rights of root, to make networks"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None] + ["sshd"] * (SSHD is None)
    if missing:
        return f"hosts need the commands {', '.join(missing)}"
    words = (
        "ip link add a0 type veth peer name b0 && ip link add s0 type bridge && tc qdisc add "
        "dev a0 root "
    )
    limit = "tbf rate 1mbit burst 32kbit latency 50ms"
    tried = subprocess.run(
        ["unshare", *KINDS, "--fork", "--mount-proc", "sh", "-c", words + limit],
        capture_output=True,
        text=True,
    )
    return f"hosts cannot be made here: {tried.stderr.strip()}" if tried.returncode else None


@contextlib.contextmanager
def hosts(count: int, folder: Path, rate: str = "1gbit") -> Iterator[list[Host]]:
    """Hosts `node0`, `node1`... with the addresses 10.77.0.1, 10.77.0.2... `rate` limits each link,
    in each direction.

    As on Debian, a host's own name is 127.0.1.1 in its /etc/hosts. Each also has an interface
    `docker0`, with the same address on all hosts."""
    names = {f"node{index}": f"10.77.0.{index + 1}" for index in range(count)}
    _write_files(folder, names)
    held: list[subprocess.Popen[str]] = []
    try:
        switch = _hold("echo ready; exec sleep infinity", held)
        _in_network(
            switch, "ip link add switch0 type bridge forward_delay 0", "ip link set switch0 up"
        )
        made = []
        for name, address in names.items():
            first = _hold(START_HOST.format(name=name, folder=folder, sshd=SSHD), held)
            _connect(switch, first, name, address, rate)
            made.append(Host(name, address, held[-1], first))
        yield made
    finally:
        for holder in held:
            _end(holder)


def _write_files(folder: Path, names: dict[str, str]) -> None:
    for key in ("host", "user"):
        _do(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key])
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(port=PORT, folder=folder))
    (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
    for own in names:
        others = "".join(f"{address} {name}\n" for name, address in names.items() if name != own)
        (folder / f"{own}.hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {own}\n{others}")


def _hold(script: str, held: list[subprocess.Popen[str]]) -> int:
    """Start a script as the first process of new namespaces.

    Returns its number after it has said `ready`.
    """
    with_parent = ["setpriv", "--pdeathsig", "KILL"]
    command = [*with_parent, "unshare", *KINDS, "--fork", "--kill-child", "--mount-proc"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    held.append(subprocess.Popen([*command, "sh", "-c", script], text=True, **pipes))
    if held[-1].stdout.readline() != "ready\n":
        raise RuntimeError(f"a host did not start: {script}")
    (first,) = psutil.Process(held[-1].pid).children()
    return first.pid


def _end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    holder.stdout.close()


def _connect(switch: int, host: int, name: str, address: str, rate: str) -> None:
    limit = f"root tbf rate {rate} burst 256kb latency 50ms"
    _in_network(
        switch,
        f"ip link add {name} type veth peer name {INTERFACE} netns {host}",
        f"ip link set {name} master switch0",
        f"ip link set {name} up",
        f"tc qdisc add dev {name} {limit}",
    )
    _in_network(
        host,
        "ip link add docker0 type bridge",
        "ip addr add 172.17.0.1/16 dev docker0",
        "ip link set docker0 up",
        f"ip addr add {address}/24 dev {INTERFACE}",
        f"ip link set {INTERFACE} up",
        f"tc qdisc add dev {INTERFACE} {limit}",
    )


def _in_network(process: int, *commands: str) -> None:
    for command in commands:
        _do(["nsenter", "--target", str(process), "--net", *command.split()])


def _do(command: list[str | os.PathLike]) -> None:
    done = subprocess.run(list(map(os.fspath, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} failed: {done.stderr}")
