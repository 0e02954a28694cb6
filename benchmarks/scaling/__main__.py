"""Predicts a rank's step time and memory on 8 to 4,096 devices.

    python -m benchmarks.scaling
        # T5-3B and 11B, Llama 8B and 70B: a table, a picture, JSON
    python -m benchmarks.scaling llama-8b --ranks 16 128 --between 50e9

Times come from `benchmarks.scaling.timeline`, memory from `zero estimate`. Each model is predicted
with the configuration as it is, without its offload, and tuned: without offload, each group of 64
ranks with all shards (`mics_shard_size`), and room for two blocks
(`stage3_max_live_parameters`)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.runner import REPOSITORY, Parser, Row, finish, table
from benchmarks.scaling.rehearsal import make_groups, rehearse_meta
from benchmarks.scaling.timeline import (
    ASSUMPTIONS,
    SHAPES,
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
Rows = list[Row]
COLUMNS = {
    **{name: name for name in ("model", "settings", "ranks")},
    "step, s": "step",
    "computing, %": "computing",
    "largest waits, s": "largest waits",
    "device, GiB": (DEVICE, 2**30),
    "host, GiB": (HOST, 2**30),
}


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


def add_shares(row: Row) -> Row:
    waits = sorted(row["waits"].items(), key=lambda each: -each[1])[:2]
    listed = [f"{cause} {seconds:.2f}" for cause, seconds in waits if seconds > 0.005]
    share = 100 * row["busy"]["compute"] / row["step"]
    return row | {"largest waits": ", ".join(listed) or "-", "computing": share}


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


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "models",
        nargs="*",
        default=SHAPES,
        help="folders or config.json; default: %(default)s",
    )
    parser.add_argument("--ds-config", type=Path, default=CONFIG, help="a ds_config.json")
    parser.add_argument(
        "--ranks", type=count, nargs="+", default=[8, 32, 128, 512, 1024, 2048, 4096]
    )
    add_machine(parser)
    parser.add_output()
    args = parser.parse_args()
    rows: Rows = []
    try:
        for name in args.models:
            rows += map(add_shares, predictions(name, args))
            print(f"{name}: done", file=sys.stderr, flush=True)
        machine = machine_of(args, load_config(str(args.ds_config), allow_auto=True))
    except UsageError as error:
        parser.error(str(error))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, args.output.with_suffix(".png"))
    print(ASSUMPTIONS)
    finish(args, table(f"machine: {machine}", COLUMNS, rows), rows=rows)


if __name__ == "__main__":
    main()
