"""`zero estimate` beside what two ranks really take, on 12 cases.

    python -m benchmarks.estimate
    python -m benchmarks.estimate --only 3 10

Device memory is the peak of the simulated accelerator's counter (`tests/accelerator`) in three steps; host memory is
what the process holds after them. The run fails if a difference is above 10%.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from benchmarks.estimate_worker import measure, shape_of
from tests.processes import run_on
from zero.config import load_config
from zero.estimate import DEVICE, HOST, Question, build, estimate

RANKS, TOLERANCE = 2, 0.1
SMALL = {"stage3_param_persistence_threshold": 2000, "stage3_prefetch_bucket_size": 1000000}
CPU = {"device": "cpu"}
BF16 = {"bf16": {"enabled": True}}
# Model, keys of zero_optimization, other sections, batch, tokens, gradient checkpointing.
Case = tuple[str, dict[str, Any], dict[str, Any], int, int, bool]
CASES: list[Case] = [
    ("t5", {"stage": 0}, {}, 4, 128, False),
    ("llama", {"stage": 0}, BF16, 4, 256, False),
    ("gpt2", {"stage": 2}, BF16, 4, 128, False),
    ("t5", {"stage": 2}, BF16, 4, 128, True),
    ("gpt2", {"stage": 3, **SMALL}, {}, 2, 128, False),
    ("llama", {"stage": 3, **SMALL}, BF16, 4, 256, False),
    ("llama", {"stage": 3, **SMALL}, BF16, 8, 256, True),
    ("t5", {"stage": 3, **SMALL, "stage3_max_live_parameters": 5000000}, BF16, 4, 128, False),
    ("gpt2", {"stage": 2, "offload_optimizer": CPU}, BF16, 4, 128, False),
    ("llama", {"stage": 3, **SMALL, "offload_optimizer": CPU}, {}, 4, 128, False),
    ("t5", {"stage": 3, **SMALL, "offload_optimizer": CPU, "offload_param": CPU}, BF16, 4, 128, False),
    ("llama", {"stage": 3, **SMALL, "offload_optimizer": CPU, "offload_param": CPU}, BF16, 8, 256, True),
]


def run(case: Case) -> dict[str, Any]:
    name, section, others, batch, length, checkpointing = case
    settings = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": section,
        **others,
    }
    config = load_config(settings)
    model = build(shape_of(name), config.compute_dtype)
    found = estimate(model, config, Question(RANKS, batch, length, checkpointing))
    measured = run_on(RANKS, measure, name, settings, batch, length, checkpointing, simulated=True, timeout=600)
    row: dict[str, Any] = {"case": describe(case), "parameters": found.elements, "parts": found.parts}
    row["held"] = measured[0]["held"]
    for place in (DEVICE, HOST):
        row[place] = {"predicted": found.total(place), "measured": max(each[place] for each in measured)}
    return row


def describe(case: Case) -> str:
    name, section, others, batch, length, checkpointing = case
    words = [name, f"stage {section['stage']}", "bf16" if others else "fp32", f"{batch} x {length} tokens"]
    words += [f"{key.removeprefix('offload_')} offloaded" for key in section if key.startswith("offload")]
    words += ["few live parameters"] * ("stage3_max_live_parameters" in section) + ["checkpointing"] * checkpointing
    return ", ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="numbers of cases, from 1")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for number, case in enumerate(CASES, 1):
        if not args.only or number in args.only:
            rows.append(run(case))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            for place in (DEVICE, HOST):
                p, m = rows[-1][place]["predicted"], rows[-1][place]["measured"]
                print(number, rows[-1]["case"], place, f"{p/2**20:.1f} {m/2**20:.1f} {p/m-1:+.1%}" if m else "", flush=True)


if __name__ == "__main__":
    main()
