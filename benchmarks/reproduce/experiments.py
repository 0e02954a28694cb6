"""The experiments of `benchmarks.reproduce`: what each one runs, and which tables its output
becomes.
"""

from __future__ import annotations

import json
import re
import sys
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.runner import Table, draw

CONFIG = "configs/ds_config_zero3.json"
Commands = list[list[str]]


class Sizes(NamedTuple):
    """Where an experiment writes, whether it is to be short, and a folder on a fast disk for what
    is offloaded.
    """

    folder: Path
    quick: bool
    disk: Path | None


def of_benchmark(folder: Path, logs: list[Path]) -> list[Table]:
    """Return the tables that a benchmark has written."""
    (path,) = folder.glob("*.json")
    return [Table(**each) for each in json.loads(path.read_text())["tables"]]


class Experiment(NamedTuple):
    """`collect` gets the experiment's folder and the output files of its commands.
    It may draw pictures there.
    """

    name: str
    title: str
    text: str
    commands: Callable[[Sizes], Commands]
    collect: Callable[[Path, list[Path]], list[Table]] = of_benchmark


def module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]


def torchrun(ranks: int, *arguments: object) -> list[str]:
    return module("torch.distributed.run", "--standalone", "--nproc_per_node", ranks, *arguments)


def benchmark(name: str, quick: list[object], full: list[object]) -> Callable[[Sizes], Commands]:
    """One command, `python -m benchmarks.NAME`, with other arguments for a short run."""

    def commands(sizes: Sizes) -> Commands:
        arguments = quick if sizes.quick else full
        output = sizes.folder / f"{name.rpartition('.')[2]}.json"
        return [module(f"benchmarks.{name}", *arguments, "--output", output)]

    return commands


def guide(*parts: str) -> Callable[[Sizes], Commands]:
    small = ["--width", 500, "--rows", 320, "--epochs", 6, "--worlds", 1, 2]
    return benchmark("guide", ["--parts", *parts, *small], ["--parts", *parts])


def offload(sizes: Sizes) -> Commands:
    quick = ["--model", "t5-10m", "--variants", "zero3-offload", "zero3-files", "--length", 32]
    quick += ["--rounds", 1, "--warmup", 1, "--steps", 2]
    disk = ["--folder", sizes.disk] if sizes.disk else []
    return benchmark("offload", [*quick, *disk], disk)(sizes)


def gathering(sizes: Sizes) -> Commands:
    disk = ["--folder", sizes.disk] if sizes.disk else []
    return benchmark("checkpoint.consolidation", ["--model", "t5-42m", *disk], disk)(sizes)


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
    draw(folder / "three_d.png", "data x tensor x pipeline", ("step", "loss"), lines)
    caption = "A small Llama. The checkpoint of 8 ranks is resumed on 2, and made into one folder."
    return [
        Table(
            caption,
            ["data x tensor x pipeline", "elements of a rank", "step", "loss", "norm"],
            rows,
        )
    ]


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
    draw(
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
    draw(
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
    ),
    Experiment(
        "training",
        "End to end by stage: the guide's MLP",
        "Random rows, MSE, Adam: plain torch and stages 0 to 3 on 2 ranks. The losses of all runs "
        "are on one picture, "
        "and the run fails if a stage's differ from plain torch's. The guide plots curves that "
        "look alike.",
        guide("training"),
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
    ),
    Experiment(
        "compression",
        "Compressed communication",
        "The guide sums integer codes of ranks with different scales. Such a sum has no meaning: "
        "see its error.",
        benchmark("collectives.compression", ["--sizes-mb", 1, 10], []),
    ),
    Experiment(
        "offload",
        "ZeRO-Infinity: state in host memory and in files",
        "One file for each rank and folder, not one for each parameter. Without a GPU, host memory "
        "is where the model "
        "is anyway, so only the variants with files move something.",
        offload,
    ),
    Experiment(
        "gathering",
        "16-bit gather on save",
        "The whole model is gathered a group at a time into a file. The extra memory of a rank "
        "stays within two groups.",
        gathering,
    ),
    Experiment(
        "claims",
        "T5-3B: 4, 8 and 64 times less memory?",
        "The figures hold for stages 1, 2 and 3 of very many ranks, of very many, and of 64. On "
        "one rank, stage 3 "
        "saves nothing. The estimate is that of `zero estimate`; nothing is run.",
        guide("claims"),
    ),
    Experiment(
        "t5_3b",
        "T5-3B by run_translation.py",
        "One step with the state in files. T5-3B needs `--disk FOLDER` with 60 GB, and no "
        "`--quick`. Without them a "
        "small T5 takes its place. The section before has the memory of T5-3B by stage, without a "
        "run.",
        t5_3b,
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
