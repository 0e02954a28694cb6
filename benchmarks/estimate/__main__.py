"""Compares `zero estimate` with what ranks really take, on 48 cases.

    python -m benchmarks.estimate
    python -m benchmarks.estimate --only 3 10

Device memory is the peak of the simulated accelerator's counter (`tests/accelerator`) in three
steps. Host memory and files are the engine's own count after them, with all buffers for copies and
files, because the simulated device's memory is host memory too. The run fails if a difference is
above 5%.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from benchmarks.estimate.worker import LORA, QLORA, RANK, measure, shape_of
from benchmarks.runner import Parser, finish, table
from tests.processes import run_on
from zero.config import load_config
from zero.tools.estimate.machine import DEVICE, DISK, HOST
from zero.tools.estimate.model import build
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import estimate

PLACES = (DEVICE, HOST, DISK)
RANKS, TOLERANCE, LEAST = 2, 0.05, 1 << 16  # bytes: smaller differences do not count
SMALL = {"stage3_param_persistence_threshold": 2000, "stage3_prefetch_bucket_size": 1000000}
FEW = {"stage3_max_live_parameters": 0}
CPU = {"device": "cpu"}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-4}}}
# In a folder that is made for the run.
NVME = {"device": "nvme"}
FILES = NVME | {"max_in_cpu": 0}
PIPELINE = {"pipeline_read": True, "pipeline_write": True}
BF16 = {"bf16": {"enabled": True}}
TENSOR = {"tensor_parallel": {"autotp_size": 2}}
STAY = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
EXPERTS = TENSOR | STAY
SLICES = {"activation_checkpointing": {"batch_slices": 4}}
TWO = {"gradient_accumulation_steps": 2}
ON_HOST = {"activation_checkpointing": {"cpu_checkpointing": True}}
CODED_WEIGHTS, CODED_GRADIENTS = (
    {"zero_quantized_weights": True},
    {"zero_quantized_gradients": True},
)
CODED = CODED_WEIGHTS | CODED_GRADIENTS
FOUR_BITS = CODED_GRADIENTS | {"zero_quantized_gradient_bits": 4}
# On two machines of two ranks.
SECOND = {"zero_hpz_partition_size": 2}
# Model, keys of zero_optimization, other sections, batch, tokens, gradient checkpointing.
Case = tuple[str, dict[str, Any], dict[str, Any], int, int, bool]
CASES: list[Case] = [
    ("llama", {"stage": 1}, BF16 | TENSOR, 2, 128, False),
    ("llama", {"stage": 3, **SMALL}, BF16 | TENSOR, 2, 128, True),
    ("llama-lora", {"stage": 2}, BF16, 2, 128, False),
    ("llama-lora", {"stage": 3, **SMALL}, BF16, 2, 128, True),
    ("t5-lora", {"stage": 3, **SMALL, "offload_param": CPU}, BF16, 2, 64, False),
    ("llama-qlora", {"stage": 3, **SMALL, **FEW}, BF16, 2, 128, True),
    ("llama-qlora", {"stage": 3, **SMALL, **FEW, "offload_param": CPU}, BF16, 2, 128, True),
    ("t5", {"stage": 0}, {}, 4, 128, False),
    ("llama", {"stage": 0}, BF16, 1, 32, False),
    ("gpt2", {"stage": 2}, BF16, 1, 32, False),
    ("t5", {"stage": 2, "reduce_bucket_size": 2000000}, BF16, 4, 128, True),
    ("gpt2", {"stage": 3, **SMALL}, {}, 2, 128, False),
    ("llama", {"stage": 3, **SMALL}, BF16, 4, 256, False),
    ("llama", {"stage": 3, **SMALL}, BF16, 2, 128, True),
    ("t5", {"stage": 3, **SMALL, "stage3_max_live_parameters": 5000000}, BF16, 1, 32, False),
    ("gpt2", {"stage": 2, "offload_optimizer": CPU}, BF16, 1, 32, False),
    ("llama", {"stage": 3, **SMALL, "offload_optimizer": CPU}, {}, 4, 128, False),
    (
        "t5",
        {"stage": 3, **SMALL, "offload_optimizer": CPU, "offload_param": CPU},
        BF16,
        4,
        128,
        False,
    ),
    (
        "llama",
        {"stage": 3, **SMALL, "offload_optimizer": CPU, "offload_param": CPU},
        BF16,
        1,
        64,
        True,
    ),
    ("tiny", {"stage": 3, **SMALL}, {}, 4, 128, True),
    ("gpt2", {"stage": 3, **SMALL, "offload_optimizer": CPU | {"ratio": 0.5}}, BF16, 2, 128, False),
    ("gpt2", {"stage": 2}, BF16 | MUON, 1, 32, False),
    ("llama", {"stage": 3, **SMALL}, MUON, 1, 32, False),
    ("gpt2", {"stage": 2, "offload_optimizer": NVME | PIPELINE}, BF16, 1, 32, False),
    (
        "llama",
        {"stage": 3, **SMALL, "offload_optimizer": NVME, "offload_param": CPU},
        BF16,
        4,
        128,
        False,
    ),
    (
        "t5",
        {"stage": 3, **SMALL, "offload_optimizer": NVME | PIPELINE, "offload_param": FILES},
        BF16,
        4,
        128,
        True,
    ),
    (
        "llama",
        {"stage": 3, **SMALL, "offload_optimizer": NVME, "offload_param": FILES},
        {},
        1,
        64,
        False,
    ),
    ("llama", {"stage": 0}, BF16 | TWO, 1, 32, False),
    ("llama", {"stage": 1}, TWO, 1, 32, False),
    ("llama", {"stage": 3, **SMALL, **CODED_WEIGHTS}, BF16, 1, 32, False),
    ("llama", {"stage": 3, **SMALL, **CODED_GRADIENTS}, BF16, 1, 32, False),
    ("gpt2", {"stage": 3, **SMALL, **CODED_WEIGHTS, **FOUR_BITS}, BF16, 1, 32, False),
    ("llama", {"stage": 3, **SMALL, **CODED, **SECOND}, BF16, 1, 32, False),
    ("llama", {"stage": 0}, MUON, 1, 32, False),
    ("mixtral", {"stage": 3, **SMALL}, BF16 | MUON, 1, 32, False),
    ("mixtral", {"stage": 3, **SMALL}, BF16, 2, 128, False),
    ("mixtral", {"stage": 2}, {}, 1, 32, False),
    ("mixtral", {"stage": 1}, BF16 | EXPERTS, 2, 128, False),
    ("mixtral", {"stage": 1}, BF16 | STAY, 2, 128, False),
    ("mixtral", {"stage": 3, **SMALL}, BF16 | STAY, 2, 128, True),
    (
        "llama",
        {"stage": 3, **SMALL, "offload_optimizer": CPU, "offload_param": CPU},
        BF16 | SLICES,
        8,
        64,
        False,
    ),
    ("llama", {"stage": 3, **SMALL}, BF16 | ON_HOST, 4, 256, True),
    ("gpt2", {"stage": 2}, BF16 | ON_HOST, 2, 256, False),
    ("llama", {"stage": 1, "zero_quantized_moments": True}, BF16, 1, 32, False),
    ("gpt2", {"stage": 3, **SMALL, **CODED_GRADIENTS}, {}, 2, 128, False),
    ("t5", {"stage": 3, **SMALL, **CODED}, BF16, 1, 32, False),
    (
        "t5",
        {"stage": 3, **SMALL, **CODED, "offload_optimizer": CPU, "offload_param": CPU},
        {},
        1,
        32,
        True,
    ),
    (
        "llama",
        {"stage": 3, **SMALL, **CODED, "offload_optimizer": CPU, "offload_param": CPU},
        BF16,
        1,
        32,
        True,
    ),
]


def run(case: Case) -> dict[str, Any]:
    _, section, others, batch, *_ = case
    settings = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "aio": {"queue_depth": 4},
        **others,
    }
    with tempfile.TemporaryDirectory() as folder:
        files = {
            key: value | {"nvme_path": folder} for key, value in section.items() if "offload" in key
        }
        return _run(case, settings | {"zero_optimization": section | files})


def _run(case: Case, settings: dict[str, Any]) -> dict[str, Any]:
    name, _, _, batch, length, checkpointing = case
    config = load_config(settings)
    adapter = RANK if name.endswith((LORA, QLORA)) else ""
    model = build(shape_of(name), config.compute_dtype, adapter)
    ranks = RANKS * (config.zero_optimization.zero_hpz_partition_size or 1)  # two machines
    found = estimate(model, config, Question(ranks, batch, length, checkpointing))
    measured = run_on(
        ranks, measure, name, settings, batch, length, checkpointing, simulated=True, timeout=600
    )
    row: dict[str, Any] = {"case": describe(case), "parameters": found.elements}
    for place in PLACES:
        taken = max(each[place] for each in measured)
        parts = {"predicted": found.total(place), "measured": taken}
        row[place] = parts | {"parts": found.parts[place]}
    return row


def describe(case: Case) -> str:
    name, section, others, batch, length, checkpointing = case
    words = [
        name,
        f"stage {section['stage']}",
        "bf16" if "bf16" in others else "fp32",
        f"{batch} x {length} tokens",
    ]
    words += [
        f"{each.removeprefix('offload_')} on {section[each]['device']}"
        for each in section
        if "offload" in each
    ]
    optimizer = section.get("offload_optimizer", {})
    words += [f"ratio {optimizer.get('ratio')}"] * ("ratio" in optimizer) + ["pipelined"] * (
        "pipeline_read" in optimizer
    )
    words += ["Muon"] * ("optimizer" in others) + ["accumulation 2"] * (
        "gradient_accumulation_steps" in others
    )
    words += ["few live parameters"] * ("stage3_max_live_parameters" in section) + [
        "checkpointing"
    ] * checkpointing
    kept = others.get("activation_checkpointing", {})
    words += ["activations on the host"] * ("cpu_checkpointing" in kept)
    words += ["in slices"] * ("batch_slices" in kept)
    words += [
        f"quantized {key.removeprefix('zero_quantized_')}"
        for key, value in section.items()
        if value is True
    ]
    words += ["tensor parallelism over 2"] * ("tensor_parallel" in others)
    words += ["expert parallelism over 2"] * ("expert_parallel" in others)
    words += ["4 bits"] * ("zero_quantized_gradient_bits" in section)
    words += ["second shards"] * ("zero_hpz_partition_size" in section)
    return ", ".join(words)


def lines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line of the table for each place of each case. Small ones are left out."""
    found = []
    for row in rows:
        for place in PLACES:
            sizes = row[place]["predicted"], row[place]["measured"]
            if max(sizes) > LEAST:
                found.append({"case": row["case"], "place": place, **row[place]})
                found[-1]["difference"] = sizes[0] / sizes[1] - 1
    return found


def is_off(row: dict[str, Any]) -> bool:
    pairs = [(row[place]["predicted"], row[place]["measured"]) for place in PLACES]
    return any(
        abs(predicted - measured) > TOLERANCE * measured + LEAST for predicted, measured in pairs
    )


def main() -> None:
    parser = Parser(__doc__)
    numbers = range(1, len(CASES) + 1)
    parser.add_argument(
        "--only", type=int, nargs="+", choices=numbers, metavar="NUMBER", help="numbers of cases"
    )
    parser.add_output()
    args = parser.parse_args()
    rows = [run(CASES[number - 1]) for number in args.only or numbers]
    columns = {"case": "case", "place": "place", "difference": "difference"}
    columns |= {f"{key}, MiB": (key, 2**20) for key in ("predicted", "measured")}
    finish(args, table("zero estimate beside ranks", columns, lines(rows)), rows=rows)
    if wrong := [row["case"] for row in rows if is_off(row)]:
        sys.exit(f"error: off by more than {TOLERANCE:.0%}: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
