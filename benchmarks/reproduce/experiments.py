"""The experiments of `benchmarks.reproduce`: what each one runs, and which tables its JSON and
output become.
"""

from __future__ import annotations

import json
import re
import sys
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reproduce.parts import (
    Commands,
    Experiment,
    Sizes,
    Table,
    benchmark,
    chosen,
    curves,
    module,
    percent,
    read,
    torchrun,
)

CONFIG = "configs/ds_config_zero3.json"


# -- stages


def of_stages(folder: Path, logs: list[Path]) -> list[Table]:
    result = read(folder, "stages")
    rows = []
    for row in result["rows"]:
        states = sum(row["measured"][name] for name in ("parameters", "gradients", "optimizer"))
        formula = sum(value for name, value in row["expected"].items() if name != "accumulated")
        sizes = [size / result["parameters"] for size in (row["paper"], formula, states)]
        saved = percent(1 - states / (16 * result["parameters"]))
        rows.append(
            [
                row["ranks"],
                row["stage"],
                *sizes,
                saved,
                row["peak"] / 1e6,
                row["cpu"],
                row["cpu_ratio"],
            ]
        )
    columns = [
        "ranks",
        "stage",
        "paper",
        "formula",
        "measured",
        "less than 16",
        "peak MB",
        "CPU s",
        "CPU / stage 0",
    ]
    caption = (
        f"T5 of {result['parameters'] / 1e6:.1f}M parameters in bf16. Model states of a "
        "rank "
        "in bytes a parameter."
    )
    last = [[name, losses[0], losses[-1]] for name, losses in result["curves"].items()]
    return [
        Table(caption, columns, rows),
        Table("A tiny T5 on 2 ranks: loss", ["run", "first", "last"], last),
    ]


def guide(*parts: str) -> Callable[[Sizes], Commands]:
    small = ["--width", 500, "--rows", 320, "--epochs", 6, "--worlds", 1, 2]
    return benchmark("guide", ["--parts", *parts, *small], ["--parts", *parts])


def of_training(folder: Path, logs: list[Path]) -> list[Table]:
    rows = read(folder, "guide")["training"]
    found = []
    for row in rows:
        states = row["states"] / row["parameters"]
        saved = percent(1 - row["states"] / rows[0]["states"])
        times = [row["seconds"], row["cpu_seconds"], row["peak"] / 1e6]
        found.append(
            [row["run"], states, saved, *times, row["losses"][0], f"{row['losses'][-1]:.9g}"]
        )
    columns = [
        "run",
        "bytes a parameter",
        "less",
        "s",
        "CPU s",
        "peak MB",
        "first epoch's loss",
        "last epoch's loss",
    ]
    caption = (
        f"An MLP of {rows[0]['parameters'] / 1e6:.1f}M parameters in fp32, batch 32; "
        "seconds "
        "of rank 0"
    )
    return [Table(caption, columns, found)]


def of_activations(folder: Path, logs: list[Path]) -> list[Table]:
    columns = {
        "network": "network",
        "without": "kept",
        "with": "kept with checkpoints",
        "offloaded": "sent to the host",
    }
    rows = [
        {name: value if isinstance(value, str) else value / 1e6 for name, value in row.items()}
        for row in read(folder, "guide")["activations"]
    ]
    return [chosen("MB that autograd keeps for backward, parameters not counted", columns, rows)]


def of_claims(folder: Path, logs: list[Path]) -> list[Table]:
    rows = [
        [row["stage"], row["ranks"], row["paper"] / 1e9, row["times_less"], row["estimate"] / 1e9]
        for row in read(folder, "guide")["claims"]
    ]
    columns = ["stage", "ranks", "paper GB", "times less", "zero estimate GB"]
    return [
        Table(
            "T5-3B in bf16 with AdamW: model states of a rank; the estimate has the buffers too",
            columns,
            rows,
        )
    ]


def of_meshes(folder: Path, logs: list[Path]) -> list[Table]:
    rows = read(folder, "guide")["meshes"]
    columns = [
        "ranks",
        "data x sequence x tensor x pipeline",
        *(f"stage {stage}" for stage in range(4)),
        "paper, stages 0 to 3",
    ]
    found: dict[tuple[int, ...], list[Any]] = {}
    for row in rows:
        key = (row["ranks"], row["data"], row["sequence"], row["tensor"], row["pipeline"])
        found.setdefault(key, []).append(
            (row["states"] / row["elements"], row["paper"] / row["elements"])
        )
    table = [
        [
            key[0],
            " x ".join(map(str, key[1:])),
            *(states for states, _ in of),
            ", ".join(f"{p:.3g}" for _, p in of),
        ]
        for key, of in found.items()
    ]
    return [
        Table("Bytes a parameter of the largest rank: a Llama in bf16 with AdamW", columns, table)
    ]


# -- communication


def of_collectives(folder: Path, logs: list[Path]) -> list[Table]:
    rows = read(folder, "collectives")["rows"]
    columns = {"operation": "operation", "mb": "MB", "way": "way", "ms": "ms", "cpu_ms": "CPU ms"}
    bandwidths = {"algorithm_gb_per_s": "algorithm GB/s", "bus_gb_per_s": "bus GB/s"}
    buckets = [row for row in rows if row["operation"].startswith("gradients")]
    others = [row for row in rows if row not in buckets]
    return [
        chosen(
            "Collectives of 2 ranks, fp32. A million elements are 4 MB.",
            columns | bandwidths,
            others,
        ),
        chosen("Gradients of many tensors: one by one, and in a bucket", columns, buckets),
    ]


def of_compression(folder: Path, logs: list[Path]) -> list[Table]:
    result = read(folder, "compression")
    schemes: dict[str, tuple[list[float], list[float]]] = {}
    for row in result["sums"]:
        factors, errors = schemes.setdefault(row["scheme"], ([], []))
        factors.append(row["factor"])
        errors.append(row["error"])
    axes = ("rank 1's values / rank 0's", "relative error")
    curves(folder / "sums.png", "A sum over two ranks in 8 and 4 bits", axes, schemes)
    sums = {"scheme": "scheme", "factor": "rank 1's values / rank 0's", "error": "relative error"}
    columns = {
        "operation": "operation",
        "dtype": "dtype",
        "way": "way",
        "mb": "MB",
        "sent": "bytes sent",
        "ms": "ms",
    }
    tables = [
        chosen("Error of a sum over 2 ranks", sums, result["sums"]),
        chosen("Collectives of 2 ranks", columns | {"cpu_ms": "CPU ms"}, result["collectives"]),
    ]
    for part, measured in (("translation", "bleu"), ("distillation", "loss")):
        found = result.get(part) or {}
        if found:
            rows = [[name, of[measured]] for name, of in found.items()]
            tables.append(Table(f"{part} demonstration", ["variant, seed", measured], rows))
    return tables


# -- more than one dimension


def three_d(sizes: Sizes) -> Commands:
    steps, every = (4, 2) if sizes.quick else (60, 20)
    of_run = ["--steps", steps, "--save-every", every]
    longer = ["--steps", steps + every, "--save-every", every]
    saved = sizes.folder / "checkpoint"
    alone = ["--tensor", 1, "--pipeline", 1, *longer, "--output", sizes.folder / "alone"]
    example = "examples/three_d.py"
    resumed = ["--tensor", 1, "--resume", *longer, "--output", saved]
    return [
        torchrun(1, example, *alone),
        torchrun(8, example, *of_run, "--output", saved),
        torchrun(2, example, *resumed),
        module("zero", "consolidate", saved, sizes.folder / "model"),
    ]


def of_three_d(folder: Path, logs: list[Path]) -> list[Table]:
    rows, lines = [], {}
    for name, log in zip(["one process", "2 x 2 x 2", "1 x 1 x 2, resumed"], logs, strict=False):
        text = log.read_text()
        elements = int(re.search(r"each holds (\d+) elements", text)[1])
        found = re.findall(r"step (\d+): loss ([\d.]+), norm ([\d.]+)", text)
        rows += [[name, elements, int(step), loss, norm] for step, loss, norm in found]
        lines[name] = ([int(step) for step, *_ in found], [float(loss) for _, loss, _ in found])
    curves(folder / "three_d.png", "data x tensor x pipeline", ("step", "loss"), lines)
    caption = "A small Llama. The checkpoint of 8 ranks is resumed on 2, and made into one folder."
    return [
        Table(
            caption,
            ["data x tensor x pipeline", "elements of a rank", "step", "loss", "norm"],
            rows,
        )
    ]


# -- offload


def of_offload(folder: Path, logs: list[Path]) -> list[Table]:
    rows = read(folder, "offload")["rows"]
    found = []
    for name, row in rows.items():
        moved = [
            row[key] / 1e6 if key in row else None
            for key in ("host", "gathered", "reduced", "read", "written")
        ]
        found.append([name, row["seconds"], row["cpu"], row["to_reference"], *moved])
    columns = [
        "variant",
        "s",
        "CPU s",
        "/ no offload",
        "host MB",
        "gathered",
        "reduced",
        "read",
        "written",
    ]
    return [Table("A step with state in host memory and in files; MB a step", columns, found)]


def offload(sizes: Sizes) -> Commands:
    quick = [
        "--model",
        "t5-10m",
        "--variants",
        "cpu",
        "nvme",
        "--rounds",
        1,
        "--warmup",
        1,
        "--steps",
        2,
    ]
    quick += ["--length", 32]
    disk = ["--folder", sizes.disk] if sizes.disk else []
    return benchmark("offload", [*quick, *disk], disk)(sizes)


def gathering(sizes: Sizes) -> Commands:
    disk = ["--folder", sizes.disk] if sizes.disk else []
    return benchmark("checkpoint.consolidation", ["--model", "t5-42m", *disk], disk)(sizes)


def of_gathering(folder: Path, logs: list[Path]) -> list[Table]:
    result = read(folder, "consolidation")
    limit = result["ranks"][0]["two_units"] / 1e6
    rows = [
        [name, number, way["seconds"], way["memory"] / 1e6, limit]
        for number, rank in enumerate(result["ranks"])
        for name, way in rank["ways"].items()
    ]
    caption = (
        f"T5 of {result['ranks'][0]['parameters'] / 1e6:.0f}M parameters, fp32, stage 3 on 2 ranks"
    )
    return [Table(caption, ["way", "rank", "s", "extra MB", "two groups MB"], rows)]


# -- the two posts


def translation(sizes: Sizes) -> Commands:
    few = [
        "--max_steps",
        60,
        "--max_eval_samples",
        32,
        "--max_predict_samples",
        32,
        "--logging_steps",
        10,
    ]
    out = ["--overwrite_output_dir", "--output_dir", sizes.folder / "model"]
    return [
        torchrun(
            2, "run_translation.py", "--deepspeed", CONFIG, *(few if sizes.quick else []), *out
        )
    ]


def of_translation(folder: Path, logs: list[Path]) -> list[Table]:
    text = logs[0].read_text()
    steps = [literal_eval(line) for line in re.findall(r"\{'loss'.*?\}", text)]
    epochs, losses = ([float(step[key]) for step in steps] for key in ("epoch", "loss"))
    curves(
        folder / "loss.png",
        "English to German, ZeRO-3 on 2 ranks",
        ("epoch", "loss"),
        {"loss": (epochs, losses)},
    )
    figures = re.findall(r"(predict_bleu|eval_loss|train_samples_per_second)\s*=\s*([\d.]+)", text)
    return [
        Table(
            "The demonstration of run_translation.py",
            ["figure", "value"],
            [list(each) for each in figures],
        )
    ]


def t5_3b(sizes: Sizes) -> Commands:
    """Without a disk that is named only the small model: 60 GB would go where nobody expects
    them.
    """
    small = sizes.quick or not sizes.disk
    disk = ["--folder", sizes.disk or sizes.folder / "files"]
    return benchmark("applications.t5_3b", [*disk, "--small"], [*disk, *["--small"] * small])(sizes)


def of_t5_3b(folder: Path, logs: list[Path]) -> list[Table]:
    result = read(folder, "t5_3b")
    caption = (
        f"{result.pop('model')}: run_translation.py with all state in files (on a GPU: in "
        "host memory), batch 1"
    )
    return [Table(caption, ["figure", "value"], [list(each) for each in result.items()])]


def distillation(sizes: Sizes) -> Commands:
    few = ["--teacher_steps", 40, "--max_steps", 20, "--eval_steps", 10, "--max_eval_samples", 64]
    arguments = [
        *(few if sizes.quick else []),
        "--overwrite_output_dir",
        "--output_dir",
        sizes.folder / "demo",
    ]
    return [[sys.executable, "run_distill.py", *map(str, arguments)]]


def of_distillation(folder: Path, logs: list[Path]) -> list[Table]:
    result = json.loads((folder / "demo" / "report.json").read_text())
    lines = {
        name: tuple(zip(*of["curve"], strict=True))
        for name, of in result.items()
        if name in ("baseline", "distilled")
    }
    curves(
        folder / "held_out_loss.png",
        "A student without and with a teacher",
        ("step", "held-out loss"),
        lines,
    )
    rows = [[name, of["eval_loss"]] for name, of in result.items()]
    return [
        Table(
            "The demonstration of run_distill.py: nats per token on held-out text",
            ["model", "loss"],
            rows,
        )
    ]


EXPERIMENTS = [
    Experiment(
        "stages",
        "Stages 0 to 3: memory, time, loss",
        "A rank's bytes beside the formula of the ZeRO paper (2 + 2 + 12 bytes a parameter, each "
        "divided by the ranks "
        "from its stage on) and this engine's (gradients are summed in fp32). The losses of all "
        "stages and of plain "
        "torch are on one picture. The guide's toy classes shard gradients at stage 1 and "
        "optimizer state at stage 2; "
        "in the paper it is the other way round.",
        benchmark(
            "stages",
            ["--world-sizes", 2, "--rounds", 1, "--steps", 1, "--train-steps", 30],
            ["--world-sizes", 1, 2, 4],
        ),
        of_stages,
    ),
    Experiment(
        "training",
        "End to end by stage: the guide's MLP",
        "Random rows, MSE, Adam: plain torch and stages 0 to 3 on 2 ranks. The losses of all runs "
        "are on one picture, "
        "and the run fails if a stage's differ from plain torch's. The guide plots curves that "
        "look alike.",
        guide("training"),
        of_training,
    ),
    Experiment(
        "activations",
        "Gradient checkpointing and activation offload",
        "The guide wraps single layers in checkpoints and expects less memory. A checkpoint keeps "
        "its input, and so "
        "does a single layer: nothing is saved. Segments of several layers save. "
        "`cpu_checkpointing` sends what is "
        "kept to host memory; the bytes are those of its counter. A tensor that two operations "
        "keep is sent twice.",
        guide("activations"),
        of_activations,
    ),
    Experiment(
        "collectives",
        "all_reduce, all_gather, broadcast by size; bucketing",
        "Algorithm bandwidth is bytes over seconds. Bus bandwidth is what a link carries. Guides "
        "mix them. Bucketing: "
        "many tensors reduced one by one, or copied together first.",
        benchmark(
            "collectives", ["--sizes-mb", 0.4, 4, 16, "--repeats", 3], ["--sizes-mb", 4, 40, 400]
        ),
        of_collectives,
    ),
    Experiment(
        "three_d",
        "3D parallelism: data x tensor x pipeline",
        "The guide's model computes something else than a plain one: its row-parallel output is "
        "divided after the sum, "
        "and its stages send nothing. Here the losses of 8 processes are those of one.",
        three_d,
        of_three_d,
    ),
    Experiment(
        "meshes",
        "Memory by stage and mesh",
        "Model states of the largest rank, by counter. The paper's formula is given a part of 1 / "
        "(tensor x pipeline) "
        "of the model. Ranks that share sequences shard the model as ranks of data do. Norms are "
        "not shared by tensor "
        "parallelism, and the first and the last stage have an embedding each, so a rank may hold "
        "more than that "
        "part. `--quick` leaves out 4 and 8 ranks. This engine keeps gradients in fp32. At stage "
        "3, parameters that "
        "are gathered at that moment count too.",
        guide("meshes"),
        of_meshes,
    ),
    Experiment(
        "compression",
        "Compressed communication",
        "The guide sums integer codes of ranks with different scales. Such a sum has no meaning: "
        "see its error.",
        benchmark(
            "collectives.compression", ["--parts", "sums", "collectives", "--sizes-mb", 1, 10], []
        ),
        of_compression,
    ),
    Experiment(
        "offload",
        "ZeRO-Infinity: state in host memory and in files",
        "One file for each rank and folder, not one for each parameter. Without a GPU, host memory "
        "is where the model "
        "is anyway, so only the variants with files move something.",
        offload,
        of_offload,
    ),
    Experiment(
        "gathering",
        "16-bit gather on save",
        "The whole model is gathered a group at a time into a file. The extra memory of a rank "
        "stays within two groups.",
        gathering,
        of_gathering,
    ),
    Experiment(
        "claims",
        "T5-3B: 4, 8 and 64 times less memory?",
        "The figures hold for stages 1, 2 and 3 of very many ranks, of very many, and of 64. On "
        "one rank, stage 3 "
        "saves nothing. The estimate is that of `zero estimate`; nothing is run.",
        guide("claims"),
        of_claims,
    ),
    Experiment(
        "t5_3b",
        "T5-3B by run_translation.py",
        "One step with the state in files. T5-3B needs `--disk FOLDER` with 60 GB, and no "
        "`--quick`. Without them a "
        "small T5 takes its place. The section before has the memory of T5-3B by stage, without a "
        "run.",
        t5_3b,
        of_t5_3b,
    ),
    Experiment(
        "translation",
        "T5 learns to translate",
        "The demonstration of run_translation.py with ZeRO-3 on 2 processes. With `--quick` it "
        "stops after 60 steps, "
        "long before it translates well.",
        translation,
        of_translation,
    ),
    Experiment(
        "distillation",
        "Distillation",
        "A student learns from a teacher, another one from the data alone, with the same steps. "
        "With `--quick` the "
        "teacher has trained for 40 of its 1200 steps. It knows little, and hardly helps.",
        distillation,
        of_distillation,
    ),
]
