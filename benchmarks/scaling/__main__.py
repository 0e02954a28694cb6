"""Predicts a rank's step time and memory on 8 to 4,096 devices, and measures the prediction's error
where possible.

    python -m benchmarks.scaling
        # T5-3B and 11B, Llama 8B and 70B: a table, a picture, JSON
    python -m benchmarks.scaling llama-8b --ranks 16 128 --between 50e9
    python -m benchmarks.scaling --check
        # 1, 2, 4, 8 processes here, in network namespaces (needs root)

Times come from `benchmarks.scaling.timeline`, memory from `zero estimate`. Each model is predicted
with the configuration as it is, without its offload, and tuned: without offload, each group of 64
ranks with all shards (`mics_shard_size`), and room for two blocks
(`stage3_max_live_parameters`)."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.arguments import Parser
from benchmarks.launch import REPORT_FOLDER, REPOSITORY
from benchmarks.scaling import worker
from benchmarks.scaling.rehearsal import make_groups, rehearse_meta
from benchmarks.scaling.timeline import (
    ASSUMPTIONS,
    SHAPES,
    Machine,
    add_machine,
    machine_of,
    predict,
    shape_of,
)
from zero.config import Config, load_config
from zero.errors import UsageError
from zero.tools.arguments import count
from zero.tools.estimate.machine import DEVICE, HOST
from zero.tools.estimate.model import build, fill_in
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import estimate

CONFIG = REPOSITORY / "configs" / "ds_config_zero3.json"
TUNED = {"mics_shard_size": 64, "stage3_max_live_parameters": int(2e9)}
# Bytes/s that each process of the check may send, and how many processes there are. The links are
# so slow that the processes, which share a few cores, compute for a small part of a step.
CHECK_RATE = 20e6 / 8
# Processes, and what differs in the section `zero_optimization`.
CHECKS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}), (2, {}), (4, {}), (8, {}), (4, {"mics_shard_size": 2}), (4,
    {"zero_hpz_partition_size": 2}),
)  # fmt: skip
# tc counts the headers of Ethernet, IP and TCP: of 1,514 bytes 1,448 are data.
DATA = 1448 / 1514
TIMEOUT = 600  # seconds of one job
OF_THE_CHECK = f"""\
- Links of {CHECK_RATE * 8 / 1e6:g} Mbit/s, of which {DATA:.1%} are data, without latency. All
  processes share the cores. Compute and updates take the time that the same job takes on links
  without a limit. So they contain the cost of messages on the CPU."""
Rows = list[dict[str, Any]]


def without_offload(config: Config) -> Config:
    zero = config.zero_optimization.model_copy(
        update={"offload_param": None, "offload_optimizer": None}
    )
    return config.model_copy(update={"zero_optimization": zero})


def tuned(config: Config, ranks: int) -> Config:
    changed = TUNED | {"mics_shard_size": min(ranks, TUNED["mics_shard_size"])}
    zero = without_offload(config).zero_optimization.model_copy(update=changed)
    return config.model_copy(update={"zero_optimization": zero})


def predictions(name: str, args: argparse.Namespace) -> Rows:
    shape = shape_of(name)
    config = fill_in(load_config(str(args.ds_config), allow_auto=True), shape)
    fake, rows = build(shape, config.compute_dtype), []
    settings = {"as configured": lambda ranks: config}
    if config.zero_optimization.offloads_params or config.zero_optimization.offloads_optimizer:
        settings["without offload"] = lambda ranks: without_offload(config)
    settings["tuned"] = lambda ranks: tuned(config, ranks)
    for words, of_ranks in settings.items():
        largest = of_ranks(max(args.ranks))  # the program is the same on any number of ranks
        model, program = rehearse_meta(
            shape, largest, args.batch, args.seq, not args.no_checkpointing
        )
        for ranks in args.ranks:
            each = of_ranks(ranks)
            machine = machine_of(args, each)
            times = predict(make_groups(model, each, ranks), program, each, machine, ranks)
            question = Question(ranks, args.batch, args.seq, not args.no_checkpointing)
            memory = estimate(fake, each, question)
            places = {place: memory.total(place) for place in (DEVICE, HOST)}
            rows.append({"model": name, "settings": words, "ranks": ranks, **times, **places})
    return rows


def table(rows: Rows) -> str:
    lines = [
        "| model | settings | ranks | step, s | computing | largest waits, s | device, GiB | host, "
        "GiB |"
    ]
    lines.append("|---" * 8 + "|")
    for row in rows:
        waits = sorted(row["waits"].items(), key=lambda each: -each[1])[:2]
        listed = (
            ", ".join(f"{cause} {seconds:.2f}" for cause, seconds in waits if seconds > 0.005)
            or "-"
        )
        share = row["busy"]["compute"] / row["step"]
        lines.append(
            f"| {row['model']} | {row['settings']} | {row['ranks']} | {row['step']:.2f} | "
            f"{share:.0%} | {listed} |"
            f" {row[DEVICE] / 2**30:.1f} | {row[HOST] / 2**30:.1f} |"
        )
    return "\n".join(lines)


def draw(rows: Rows, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        for settings, line in zip(
            dict.fromkeys(row["settings"] for row in rows), ("--", "-", ":"), strict=False
        ):
            own = [row for row in rows if (row["model"], row["settings"]) == (model, settings)]
            ranks = [row["ranks"] for row in own]
            style = {
                "linestyle": line,
                "color": f"C{number}",
                "marker": ".",
                "label": f"{model}, {settings}",
            }
            left.plot(ranks, [100 * row["busy"]["compute"] / row["step"] for row in own], **style)
            right.plot(ranks, [row[DEVICE] / 2**30 for row in own], **style)
    for axes, title in (
        (left, "share of a step spent computing, %"),
        (right, "memory of a device, GiB"),
    ):
        axes.set_xscale("log", base=2)
        axes.set(xlabel="devices", title=title)
        axes.grid(alpha=0.3)
    left.set_ylim(0, 100)
    right.set_yscale("log")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=110)


def save(rows: Rows, folder: Path) -> None:
    """Write what there is so far: the next model may take a minute."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scaling.json").write_text(json.dumps(rows, indent=2))
    draw(rows, folder / "scaling.png")


# -- the check


@contextmanager
def namespaces(number: int, rate: float | None = None) -> Iterator[list[str]]:
    """Network namespaces with an address each, whose links send `rate` bytes/s, or as many as they
    can.
    """
    names = [f"zero-scaling-{os.getpid()}-{i}" for i in range(number)]
    switch, made = f"zero-scaling-{os.getpid()}-switch", []

    def ip(*words: object) -> None:
        subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)

    try:
        for name in (switch, *names):
            ip("ip", "netns", "add", name)
            made.append(name)
        ip("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("ip", "-n", switch, "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            ip(
                "ip",
                "-n",
                switch,
                "link",
                "add",
                f"port{i}",
                "type",
                "veth",
                "peer",
                "name",
                "link0",
                "netns",
                name,
            )
            ip("ip", "-n", switch, "link", "set", f"port{i}", "master", "bridge", "up")
            ip("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "link0")
            ip("ip", "-n", name, "link", "set", "link0", "up")
            ip("ip", "-n", name, "link", "set", "lo", "up")
            if rate is not None:
                limits = ["rate", f"{rate * 8:.0f}bit", "burst", "256kb", "latency", "400ms"]
                ip(
                    "ip",
                    "netns",
                    "exec",
                    name,
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    "link0",
                    "root",
                    "tbf",
                    *limits,
                )
        yield names
    finally:
        for name in made:
            ip("ip", "netns", "del", name)


def run_processes(
    names: list[str], folder: Path, section: dict[str, Any]
) -> list[subprocess.Popen]:
    """A job with a worker in each namespace.

    `section`: what differs in the configuration's `zero_optimization`.
    """
    processes = []
    for rank, name in enumerate(names):
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "link0",
            REPORT_FOLDER: str(folder),
        }
        env |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(names))}
        env |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29577"}
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.scaling.worker"]
        command += ["--zero", json.dumps(section)]
        with (folder / f"{rank}.txt").open("w") as log:
            processes.append(
                subprocess.Popen(command, env=env, cwd=REPOSITORY, stdout=log, stderr=log)
            )
    return processes


def measured(number: int, rate: float | None, section: dict[str, Any]) -> dict[str, float]:
    """The median seconds of a step and of its update, of the slowest process.

    RuntimeError if a process fails.
    """
    with namespaces(number, rate) as names, tempfile.TemporaryDirectory() as folder:
        processes, deadline = (
            run_processes(names, Path(folder), section),
            time.monotonic() + TIMEOUT,
        )
        try:
            while any(process.poll() is None for process in processes):
                if time.monotonic() > deadline or any(process.poll() for process in processes):
                    break
                time.sleep(0.2)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, process in enumerate(processes):
            if process.returncode:
                text = Path(folder, f"{rank}.txt").read_text()[-2000:]
                raise RuntimeError(
                    f"process {rank} of {len(names)} ended with {process.returncode}:\n{text}"
                )
        found = [json.loads(path.read_text()) for path in Path(folder).rglob("*.json")]
    return {key: max(each[key] for each in found) for key in found[0]}


def check_machine(free: dict[str, float], operations: float, elements: int) -> Machine:
    """The links' speed, and speeds by which the job takes the time that it takes on links without a
    limit.

    So these contain what the processes, which share a few cores, spend on messages, copies and
    waiting for each other. `elements`: those that a rank updates."""
    return Machine(
        flops=operations / (free["step"] - free["update"]),
        between=CHECK_RATE * DATA,
        latency_between=0.0,
        per_node=1,
        # An update moves 32 bytes for each element: gradient, master, moments and weight in fp32.
        device_memory_bandwidth=32 * elements / free["update"],
        direct=True,
    )


def check() -> Rows:
    """Predicted and measured seconds of a step on processes whose links are limited."""
    shape, rows = worker.shape(), []
    batch, length = worker.BATCH, worker.LENGTH
    for processes, section in CHECKS:
        config = load_config(worker.keys(section))
        model, program = rehearse_meta(shape, config, batch, length, False, False)
        groups, operations = make_groups(model, config, processes), sum(op.cost for op in program)
        free, taken = measured(processes, None, section), measured(processes, CHECK_RATE, section)
        machine = check_machine(free, operations, sum(group.layout.shard_numel for group in groups))
        predicted = predict(groups, program, config, machine, processes, on_accelerator=False)
        rows.append(
            {
                "processes": processes,
                "section": section,
                "free": free,
                "measured": taken,
                **predicted,
            }
        )
        print(f"{processes} processes: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def table_of_check(rows: Rows) -> str:
    lines = [
        "| processes | without a limit, s | on the links, s | predicted, s | measured, s | "
        "difference |"
    ]
    lines.append("|---" * 6 + "|")
    for row in rows:
        taken = row["measured"]["step"]
        times = (
            f"{row['free']['step']:.2f} | {row['busy'].get('network', 0):.2f} | "
            f"{row['step']:.2f} | {taken:.2f}"
        )
        keys = "".join(f", {key} {value}" for key, value in row["section"].items())
        lines.append(f"| {row['processes']}{keys} | {times} | {row['step'] / taken - 1:+.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "models",
        nargs="*",
        default=list(SHAPES),
        help="folders or config.json; default: %(default)s",
    )
    parser.add_argument("--ds-config", type=Path, default=CONFIG, help="a ds_config.json")
    parser.add_argument(
        "--ranks", type=count, nargs="+", default=[8, 32, 128, 512, 1024, 2048, 4096]
    )
    parser.add_argument("--check", action="store_true", help="measure here, instead")
    parser.add_argument(
        "--output",
        type=Path,
        default=REPOSITORY / "benchmarks" / "out" / "scaling",
        help="a folder",
    )
    add_machine(parser)
    args = parser.parse_args()
    if args.check and os.geteuid():
        sys.exit("skipped: network namespaces need root")
    rows: Rows = []
    try:
        for name in () if args.check else args.models:
            rows += predictions(name, args)
            print(f"{name}: done", file=sys.stderr, flush=True)
            save(rows, args.output)
    except UsageError as error:
        parser.error(str(error))
    if args.check:
        rows = check()
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(ASSUMPTIONS)
    if args.check:
        print(f"{OF_THE_CHECK}\n\n{table_of_check(rows)}")
        return
    config = load_config(str(args.ds_config), allow_auto=True)
    print(f"machine: {machine_of(args, config)}\n\n{table(rows)}\n\nwritten: {args.output}")


if __name__ == "__main__":
    # As Ctrl-C: namespaces and processes are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    main()
