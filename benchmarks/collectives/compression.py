"""Compressed communication: errors of a sum, bytes and time of each collective, and the effect on
two training runs.

    python -m benchmarks.collectives.compression
    python -m benchmarks.collectives.compression --parts sums collectives
        # the other parts are taken from an earlier run's file
    python -m benchmarks.collectives.compression --parts translation --seeds 1 2
        # in addition to the seeds that exist already

sums         A gradient of 2 ranks is summed by each scheme; rank 1's values are larger by a
             factor. The error is the 2-norm of the difference to the sum in float64, over that of
             the sum. "one scale, sum of codes" is the method of a known guide: each rank scales
             its whole tensor by its own largest value, the codes are summed over ranks, and the
             sum is multiplied by one rank's scale. Codes of different scales have different units:
             the sum of 100 cm and 1 inch is not 101 cm.
collectives  The engine's all-gather and reduce-scatter on gloo, plain and compressed: bytes sent by
             a rank, and time.
translation  The demonstration of run_translation.py, with and without: loss by step, BLEU.
distillation The demonstration of run_distill.py: loss of the distilled student on held-out text.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import Parser, result_file
from benchmarks.launch import REPOSITORY, run_job, run_ranks
from zero.comm.quantized import decode, encode, message_bytes
from zero.tools.arguments import above_zero, count

PARTS = ("sums", "collectives", "translation", "distillation")
FACTORS = (1, 2, 10, 100)
NUMEL = 1 << 20
CONFIG = REPOSITORY / "configs" / "ds_config_zero3.json"
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "8 bits": {"zero_quantized_weights": True, "zero_quantized_gradients": True},
    "8 bits, gradients 4": {
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_quantized_gradient_bits": 4,
    },
}


# -- sums


def codes_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes with one scale for all of the tensor."""
    scale = values.abs().max() / 127
    return (values / scale).round(), scale


def naive(gradients: list[torch.Tensor]) -> torch.Tensor:
    codes, scales = zip(*map(codes_of, gradients), strict=True)
    return sum(codes) * scales[0]


def one_scale(gradients: list[torch.Tensor]) -> torch.Tensor:
    """One scale for each rank's tensor, but each is decoded by its own before the sum."""
    return sum(codes * scale for codes, scale in map(codes_of, gradients))


def in_blocks(bits: int) -> Any:
    def scheme(gradients: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(gradients[0])
        for gradient in gradients:
            message = torch.empty(message_bytes(gradient.numel(), bits), dtype=torch.uint8)
            encode(gradient, message, bits)
            decode(message, total, bits, add=True)
        return total

    return scheme


SCHEMES = {
    "one scale, sum of codes": naive,
    "one scale, decoded, then summed": one_scale,
    "blocks of 256, 8 bits": in_blocks(8),
    "blocks of 256, 4 bits": in_blocks(4),
}


def gradient_like(generator: torch.Generator) -> torch.Tensor:
    """Rows of a matrix differ in size by a factor of up to 100, as a layer's gradients do."""
    rows = torch.logspace(-2, 0, NUMEL // 1024)[:, None]
    return (torch.randn(NUMEL // 1024, 1024, generator=generator) * rows).view(-1)


def sums(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for factor in FACTORS:
        generator = torch.Generator().manual_seed(0)
        gradients = [gradient_like(generator), factor * gradient_like(generator)]
        exact = sum(gradient.double() for gradient in gradients)
        for name, scheme in SCHEMES.items():
            error = (scheme(gradients).double() - exact).norm() / exact.norm()
            found.append({"scheme": name, "factor": factor, "error": error.item()})
    return found


def show_sums(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{'error of the sum by the factor between ranks':<46}"
        + "".join(f"{factor:>9}" for factor in FACTORS)
    )
    for name in SCHEMES:
        errors = [row["error"] for row in rows if row["scheme"] == name]
        print(f"{name:<46}" + "".join(f"{error:>9.2%}" for error in errors))


# -- collectives


def collectives(args: argparse.Namespace) -> list[dict[str, Any]]:
    command = [
        "-m",
        "benchmarks.collectives.compression_worker",
        "--sizes-mb",
        *(str(size) for size in args.sizes_mb),
    ]
    ranks = run_ranks(sys.executable, command, args.ranks, 1800)
    rows = []
    for place in zip(*(rank["rows"] for rank in ranks), strict=True):
        slowest = [
            max(of_ranks) for of_ranks in zip(*(row["seconds"] for row in place), strict=True)
        ]
        cpu = [seconds for row in place for seconds in row["cpu_seconds"]]
        times = {"ms": statistics.median(slowest) * 1e3, "cpu_ms": statistics.median(cpu) * 1e3}
        rows.append(
            {key: place[0][key] for key in ("operation", "dtype", "way", "mb", "sent")} | times
        )
    return rows


def show_collectives(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{'operation':<15} {'dtype':<9} {'way':<8} {'MB':>5} {'sent MB':>9} {'of plain':>9} "
        f"{'ms':>8} {'cpu ms':>8}"
    )
    for row in rows:
        key = (row["operation"], row["dtype"], row["mb"], "plain")
        plain = next(r for r in rows if (r["operation"], r["dtype"], r["mb"], r["way"]) == key)
        print(
            f"{row['operation']:<15} {row['dtype']:<9} {row['way']:<8} {row['mb']:>5g} "
            f"{row['sent'] / 1e6:>9.3f} "
            f"{row['sent'] / plain['sent']:>9.3f} {row['ms']:>8.2f} {row['cpu_ms']:>8.2f}"
        )


# -- trainings


def with_keys(folder: Path, keys: dict[str, Any]) -> Path:
    config = json.loads(CONFIG.read_text())
    config["zero_optimization"] |= keys
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return path


def translation(args: argparse.Namespace, variant: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--deepspeed",
            with_keys(Path(folder), VARIANTS[variant]),
            "--output_dir",
            Path(folder, "out"),
        ]
        command = ["run_translation.py", *map(str, options), "--seed", str(seed)]
        output = run_job(sys.executable, command, 2, args.timeout)
    logs = [ast.literal_eval(line) for line in output.splitlines() if re.match(r"\{'loss'", line)]
    return {
        "losses": [float(log["loss"]) for log in logs],
        "epochs": [float(log["epoch"]) for log in logs],
        "bleu": float(re.search(r"predict_bleu\s*=\s*([\d.]+)", output)[1]),
    }


def distillation(args: argparse.Namespace, variant: str, seed: int) -> dict[str, Any]:
    """All variants of a seed have the teacher that the first one trains."""
    folder = REPOSITORY / "benchmarks" / "out" / "compression_distill"
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--deepspeed", with_keys(folder, VARIANTS[variant]), "--output_dir", folder / "out"]
    run_job(
        sys.executable, ["run_distill.py", *map(str, options), "--seed", str(seed)], 2, args.timeout
    )
    report = json.loads((folder / "out" / "report.json").read_text())
    return {"loss": report["distilled"]["eval_loss"], "curve": report["distilled"]["curve"]}


TRAININGS = {"translation": (translation, "bleu"), "distillation": (distillation, "loss")}


def show_training(part: str, found: dict[str, dict[str, Any]]) -> None:
    """`found` has a result for each "variant, seed"."""
    figure = TRAININGS[part][1]
    seeds = sorted({key.rpartition(", ")[2] for key in found}, key=int)
    print(
        f"\n{part}, {figure} by seed"
        + "".join(f"{seed:>10}" for seed in seeds)
        + "      mean  to exact"
    )
    means = {}
    for variant in VARIANTS:
        values = {
            seed: found[f"{variant}, {seed}"][figure]
            for seed in seeds
            if f"{variant}, {seed}" in found
        }
        if values:
            means[variant] = statistics.mean(values.values())
            same = statistics.mean(found[f"exact, {seed}"][figure] for seed in values)
            cells = "".join(
                f"{values[seed]:>10.3f}" if seed in values else f"{'-':>10}" for seed in seeds
            )
            change = means[variant] / same - 1
            print(
                f"{variant:<{len(part) + len(figure) + 10}}{cells}"
                f"{means[variant]:>10.3f}{change:>10.2%}"
            )


# -- all of it


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib  # here, so that the table can be had without it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    (errors, times), (losses, held_out) = axes
    for name in SCHEMES:
        points = [(row["factor"], row["error"]) for row in result["sums"] if row["scheme"] == name]
        errors.loglog(*zip(*points, strict=True), marker="o", label=name)
    errors.set(
        xlabel="rank 1's gradients / rank 0's", ylabel="relative error", title="sum over two ranks"
    )
    for way in ("plain", "8 bits", "4 bits"):
        rows = [
            row
            for row in result["collectives"]
            if row["way"] == way and row["operation"] == "reduce_scatter"
        ]
        points = [(row["mb"], row["ms"]) for row in rows if row["dtype"] == "float32"]
        times.loglog(*zip(*points, strict=True), marker="o", label=way)
    times.set(xlabel="MB", ylabel="ms", title="reduce-scatter of fp32")
    for curves, part in ((losses, "translation"), (held_out, "distillation")):
        for name, of in result[part].items():
            variant, _, _seed = name.rpartition(", ")
            points = (
                of["curve"] if "curve" in of else list(zip(of["epochs"], of["losses"], strict=True))
            )
            measured = TRAININGS[part][1]
            style = {"color": f"C{list(VARIANTS).index(variant)}", "marker": "."}
            curves.plot(
                *zip(*points, strict=True), label=f"{name}: {measured} {of[measured]:.2f}", **style
            )
    losses.set(
        xlabel="epoch", ylabel="training loss", title="translation demonstration", yscale="log"
    )
    held_out.set(xlabel="step", ylabel="held-out loss", title="distilled student")
    for axis in (errors, times, losses, held_out):
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=count, default=2, help="of the collectives")
    parser.add_argument(
        "--sizes-mb", type=above_zero, nargs="+", default=[1, 10, 100], help="of the fp32 buffer"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[42], help="of the trainings")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="of the trainings"
    )
    parser.add_argument("--timeout", type=above_zero, default=3600, help="seconds for one training")
    parser.add_argument(
        "--output", type=result_file, default=REPOSITORY / "benchmarks" / "out" / "compression.json"
    )
    args = parser.parse_args()
    result = json.loads(args.output.read_text()) if args.output.exists() else {}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for part in ("sums", "collectives"):
        if part in args.parts:
            result[part] = globals()[part](args)
        if part in result:
            globals()[f"show_{part}"](result[part])
    for part, (train, _) in TRAININGS.items():
        found = result.setdefault(part, {})
        for variant, seed in (
            itertools.product(args.variants, args.seeds) if part in args.parts else ()
        ):
            if f"{variant}, {seed}" not in found:
                found[f"{variant}, {seed}"] = train(args, variant, seed)
                args.output.write_text(json.dumps(result, indent=2))
        if found:
            show_training(part, found)
    args.output.write_text(json.dumps(result, indent=2))
    if all(result.get(part) for part in PARTS):
        plot(result, args.output.with_suffix(".png"))
        print(f"\nwritten: {args.output.with_suffix('.png')}")
    print(f"\nwritten: {args.output}")


if __name__ == "__main__":
    main()
