"""Thousands of damaged configurations: none may hang, end in a raw traceback, or pass with a
misspelt key.

    python -m benchmarks.faults --trials 500 --seed 0 --parts config

Each trial takes a configuration of this project, and misspells a key, inserts a strange value, or
moves, adds or removes keys. The configuration is passed as a dict, as text, or as text that is cut
or has changed bytes. It must be accepted, or refused by a `UsageError` that names the fault.
Otherwise the trial fails."""

from __future__ import annotations

import base64
import copy
import json
import random
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from benchmarks.faults.__main__ import Report
from benchmarks.runner import REPOSITORY
from zero.config import load_config
from zero.config.load import find
from zero.config.table import report
from zero.errors import UsageError

MOST_SECONDS = 5.0
# Keys and sections that are not in the shipped files.
OTHERS = [
    {
        "train_batch_size": 16,
        "steps_per_print": 100,
        "gradient_allreduce_op": "mean",
        "communication_data_type": "fp32",
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_min_lr": 0.01,
                "cycle_max_lr": 0.1,
                "cycle_min_mom": 0.8,
                "cycle_max_mom": 0.9,
            },
        },
        "fp16": {
            "enabled": True,
            "initial_scale_power": 16,
            "loss_scale_window": 500,
            "hysteresis": 2,
        },
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "allgather_bucket_size": 2e8,
            "round_robin_gradients": True,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/tmp",
                "pipeline_read": True,
                "ratio": 0.5,
            },
        },
        "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1},
        "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "run"},
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1},
        "_comment": "nothing",
    },
    {
        "train_micro_batch_size_per_gpu": 4,
        "bfloat16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "cpu_offload": True,
            "leaf_module": {"classes": ["Experts"]},
        },
        "zero_optimization.stage3_prefetch_bucket_size": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 1e-4,
                "warmup_num_steps": 10,
                "total_num_steps": 100,
            },
        },
        "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4},
        "data_types": {"grad_accum_dtype": "fp32"},
        "checkpoint": {"tag_validation": "WARN", "parallel_write": {"pipeline_stage": False}},
        "wandb": {"enabled": False, "project": "mine"},
        "timers": {"throughput": {"enabled": True}},
    },
]
_LETTERS = "abcdefghijklmnopqrstuvwxyz_"


def _nested(levels: int) -> dict:
    value: dict = {}
    for _ in range(levels):
        value = {"zero_optimization": value}
    return value


# As JSON, so that each use makes a new object.
STRANGE = [
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "-1",
        "0",
        "0.5",
        "1e308",
        "1e30",
        str(-(10**30)),
        "true",
        "false",
        "null",
    ),
    *(
        '""',
        '"auto"',
        '"yes"',
        '"AUTO"',
        '"0"',
        '"\\u0000"',
        '"\\ud800"',
        json.dumps("x" * 10_000),
        "[]",
        "{}",
    ),
    *(
        '[1, "a", null]',
        "[[0.9]]",
        "[NaN, NaN]",
        '{"enabled": "auto"}',
        '{"": {}}',
        '{"device": "cpu"}',
    ),
    *(
        json.dumps([0] * 10_000),
        json.dumps(_nested(300)),
        json.dumps({f"key_{i}": i for i in range(2000)}),
    ),
]


def known_configurations() -> list[dict]:
    """Return the shipped configurations and those above."""
    paths = sorted((REPOSITORY / "configs").glob("*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths] + OTHERS


def _sections(config: dict) -> list[dict]:
    found = [config]
    for section in found:
        found += [
            value for value in section.values() if isinstance(value, dict) and len(found) < 100
        ]
    return [section for section in found if section]


def _one_of(draw: Any, values: list) -> Any:
    """Do the same as `sampled_from`, without a description of all values."""
    return values[draw(st.integers(0, len(values) - 1))]


def _strange(draw: Any) -> Any:
    return json.loads(_one_of(draw, STRANGE))


@st.composite
def misspelt(draw: Any, configs: list[dict]) -> tuple[dict, str]:
    """Return a configuration with one letter of one key changed, removed, added or moved, and that
    key.
    """
    config = copy.deepcopy(_one_of(draw, configs))
    section = _one_of(draw, _sections(config))
    key = draw(st.sampled_from(sorted(section)))
    at, letter = draw(st.integers(0, len(key) - 1)), draw(st.sampled_from(_LETTERS))
    wrong = draw(
        st.sampled_from(
            [
                key[:at] + letter + key[at + 1 :],
                key[:at] + key[at + 1 :],
                key[:at] + letter + key[at:],
                key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :],
            ]
        )
    )
    section[wrong] = section.pop(key)
    return config, key


@st.composite
def damaged(draw: Any, configs: list[dict]) -> Any:
    """Return a configuration, as a dict or as text, after one to three changes."""
    config = copy.deepcopy(_one_of(draw, configs))
    for _ in range(draw(st.integers(1, 3))):
        section = _one_of(draw, _sections(config) or [config])
        key = draw(st.sampled_from(sorted(section) or ["stage"]))
        match draw(st.sampled_from(["value", "value", "remove", "add", "move", "dotted"])):
            case "value":
                section[key] = _strange(draw)
            case "remove":
                section.pop(key, None)
            case "add":
                section[draw(st.text(max_size=30))] = _strange(draw)
            case "move":
                _one_of(draw, _sections(config) or [config])[key] = section.pop(key, None)
            case "dotted":
                config[f"zero_optimization.{key}"] = _strange(draw)
    text = json.dumps(config)
    at = draw(st.integers(0, len(text) - 1))
    return draw(
        st.sampled_from(
            [
                config,
                text,
                base64.urlsafe_b64encode(text.encode()).decode(),
                text[:at],
                text[:at] + draw(st.characters()) + text[at + 1 :],
            ]
        )
    )


def outcome(source: Any) -> str:
    """Return "accepted", "refused", "slow" or the last lines of a traceback."""
    begin = time.monotonic()
    try:
        config = load_config(source, allow_auto=True)
        report(config), report(config, everything=False)
        config.resolve(2)
        result = "accepted"
    except UsageError as error:
        result = "refused" if str(error) else "an error without a text"
    except Exception:
        result = traceback.format_exc(limit=-3)
    return "slow" if time.monotonic() - begin > MOST_SECONDS else result


def _without_ignored(config: dict) -> dict:
    """Return the configuration without keys that are always ignored, because these may be
    misspelt.
    """
    kept = copy.deepcopy(config)
    for key in load_config(config, allow_auto=True).origin.ignored:
        section, name = find(kept, key)
        section.pop(name, None)
    return kept


def mutate(trials: int, seed: int, configs: list[dict]) -> Counter[str]:
    """Return the outcomes of `trials` damaged configurations. One in three has a misspelt key."""
    outcomes: Counter[str] = Counter()
    limits = {"database": None, "deadline": None, "phases": [hypothesis.Phase.generate]}
    checks = {"suppress_health_check": list(hypothesis.HealthCheck)}

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=trials - trials // 3, **limits, **checks)
    @hypothesis.given(damaged(configs))
    def try_damaged(source: Any) -> None:
        outcomes[outcome(source)] += 1

    whole = [_without_ignored(config) for config in configs if outcome(config) == "accepted"]

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=trials // 3, **limits, **checks)
    @hypothesis.given(misspelt(whole))
    def try_misspelt(case: tuple[dict, str]) -> None:
        config, key = case
        # The new letter may be the old one.
        passed = outcome(config) == "accepted" and config not in whole
        outcomes["misspelt key accepted: " + key if passed else "misspelt key refused"] += 1

    try_damaged()
    try_misspelt()
    return outcomes


def run(trials: int, chance: random.Random, folder: Path) -> Report:
    """Run six configurations for each of the `trials`."""
    outcomes = mutate(6 * trials, chance.randrange(1 << 32), known_configurations())
    return Report(outcomes, [outcome for outcome in outcomes if outcome not in GOOD])


GOOD = {"accepted", "refused", "misspelt key refused"}
