"""Compares training of a mixture of experts whose processes gather all experts with training where
tokens travel to them (`docs/mixtures-of-experts.md`).

    python -m benchmarks.experts
    python -m benchmarks.experts --processes 2 --rounds 1
    python -m benchmarks.experts --deepspeed-python ../venv-deepspeed/bin/python --rate 400mbit

A small Mixtral trains at stage 3, by zero and, if its interpreter is named, by DeepSpeed. "zero 2":
experts are divided over 2 processes. With 1 all are gathered, in DeepSpeed as a leaf module.
DeepSpeed's larger numbers are its AutoEP. The processes have a network of their own, the loopback
of a namespace, which carries `--rate` for all of them together (it needs `unshare`, `ip`, `tc`).
What this carries, divided by the processes, is what one of them sends in a step. The variants take
turns, and ratios to "zero 1" are formed within a round."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from statistics import mean
from typing import Any

from transformers import MixtralConfig

from benchmarks import models, runner
from benchmarks.measuring import PeakMemory, of_this_process, timed
from benchmarks.step.worker import CLIP, batches_of, by_engine, initialize
from zero.tools.arguments import count

ROWS, LENGTH, STEPS = 2, 64, 3
KEYS = ("sent", "seconds", "peak")
COLUMNS = {"variant": "variant", "MB sent": ("sent", 1e6), "s": "seconds", "peak MB": ("peak", 1e6)}
RATIOS = {f"{key} / zero 1": f"{key} ratio" for key in KEYS} | {"loss diff": "loss diff"}
# As in a large model, nothing stays gathered from forward to backward.
SHARDED = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 4_000_000}
LIMITED = 'ip link set lo up && tc qdisc add dev lo root tbf rate $0 burst 1mb limit 16mb && "$@"'


def measure(variant: str) -> dict[str, Any]:
    """On a process: the mean seconds of the steps, and what the network carried in each."""
    package, number = variant.split()
    size = int(number)
    shape = MixtralConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, num_local_experts=8, use_cache=False,
        architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    model: Any = models.build(shape)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": CLIP,
        "zero_optimization": SHARDED,
        "expert_parallel": {"enabled": size > 1, "autoep_size": size},
    }
    if package == "deepspeed":
        library = importlib.import_module(package)
        # All-reduces in shared memory would be neither limited nor counted.
        library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if size == 1:
            library.utils.set_z3_leaf_modules(model, [type(model.model.layers[0].mlp)])
    step = by_engine(initialize(package, model, config))
    batches = batches_of(model, ROWS, LENGTH, one=False, seed=int(os.environ["RANK"]))
    step(next(batches))
    before = of_this_process("net/dev")["lo"]
    with PeakMemory() as peak:
        costs, losses = timed(lambda: [step(next(batches)).item() for _ in range(STEPS)])
    sent = of_this_process("net/dev")["lo"] - before
    found = {"sent": sent / STEPS, "seconds": costs["seconds"] / STEPS, "peak": peak.most}
    return found | {"losses": losses}


def run(nproc: int, args: Any, variant: str) -> runner.Row:
    found = runner.ranks(measure, nproc, variant=variant, **runner.environment(variant, args))
    row: runner.Row = {key: max(each[key] for each in found) for key in KEYS}
    losses = [mean(step) for step in zip(*(each["losses"] for each in found), strict=True)]
    return row | {"sent": row["sent"] / nproc, "losses": losses}


def main() -> None:
    parser = runner.Parser(__doc__)
    parser.add_argument("--rate", default="800mbit", help="of the network, as tc has it")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--processes", type=count, nargs="+", default=[2, 4])
    parser.add_deepspeed()
    parser.add_output()
    args = parser.parse_args()
    if os.environ.get("GLOO_SOCKET_IFNAME") != "lo":
        command = [sys.executable, "-m", "benchmarks.experts", *sys.argv[1:]]
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.execvp("unshare", ["unshare", "-rn", "sh", "-c", LIMITED, args.rate, *command])
    packages = ["zero"] + ["deepspeed"] * bool(args.deepspeed_python)
    tables, missing, rows = [], {}, {}
    for nproc in args.processes:
        sizes = [size for size in (1, 2, 4, 8) if nproc % size == 0]
        variants = [f"{package} {size}" for package in packages for size in sizes]
        rounds, failed = runner.take_turns(variants, args.rounds, partial(run, nproc, args))
        _, rows[nproc] = runner.summary(rounds, variants, failed, {"loss diff": 1e-4}, KEYS)
        caption, found = f"{nproc} processes, {args.rate} together", runner.by_variant(rows[nproc])
        tables.append(runner.table(caption, COLUMNS | RATIOS, found))
        missing |= {f"{nproc} processes, {name}": why for name, why in failed.items()}
    runner.finish(args, *tables, missing=missing, rows=rows)


if __name__ == "__main__":
    main()
