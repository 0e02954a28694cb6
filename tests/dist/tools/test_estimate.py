"""`zero estimate` compared with two real ranks: bytes of states, gathered elements, and what a step
moves.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

import zero
from tests.parity.models import batches, build
from tests.processes import run_on
from zero.comm import traffic
from zero.comm.communicator import Communicator
from zero.config import load_config
from zero.config.optim import TYPES
from zero.offload.nvme import ScratchFile
from zero.tools.estimate.machine import DEVICE
from zero.tools.estimate.model import build as build_fake
from zero.tools.estimate.model import fill_in, read_config
from zero.tools.estimate.question import Question
from zero.tools.estimate.rank import estimate
from zero.tools.estimate.traffic import NETWORK, READ, WRITTEN

SMALL = {
    "stage": 3, "stage3_param_persistence_threshold": 40, "stage3_prefetch_bucket_size": 3000,
}  # fmt: skip
CPU = {"device": "cpu"}
MODELS = ("t5", "gpt2", "llama")


def config(zero_section: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": zero_section,
    } | others


GATHERS, GRADIENTS, REFRESH = (
    "parameters for forward and backward",
    "gradients",
    "updated parameters",
)
WHOLE = "whole tensors to their owners and back"
MUON = {"optimizer": {"type": "Muon", "params": {}}}
FP32 = {"bf16": {"enabled": False}}
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
NVME = {"device": "nvme", "nvme_path": "/tmp", "max_in_cpu": 0}
FILES = {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp", "overlap_step": False},
}
ONE = {"gradient_accumulation_steps": 1}
BITS = {"zero_quantized_gradient_bits": 4}
TRAFFIC: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 0": ("gpt2", config({"stage": 0}, **FP32)),
    "stage 1": ("llama", config({"stage": 1}, **FP32)),
    "bf16 messages": ("llama", config({"stage": 1}, **FP32, communication_data_type="bf16")),
    "stage 2": ("t5", config({"stage": 2})),
    **{f"{name}, stage 3": (name, config(SMALL, gradient_accumulation_steps=3)) for name in MODELS},
    "stage 3, few live": ("gpt2", config({**SMALL, "stage3_max_live_parameters": 6000})),
    "stage 3, no reuse": ("t5", config({**SMALL, "stage3_max_reuse_distance": 0})),
    "stage 3, Muon": ("gpt2", config(SMALL, **MUON)),
    "stage 3, Muon, no accumulation": ("llama", config({"stage": 3}, **ONE, **MUON)),
    "stage 3, codes": ("llama", config({**SMALL, **QUANTIZED, **BITS})),
    "optimizer in files": ("large", config({**FILES, "stage": 2})),
    "fp32 weights on the host": ("large", config({**FILES, "offload_param": CPU}, **FP32)),
    "8-bit moments in files": ("large", config({**FILES, "zero_quantized_moments": True})),
    "all in files": ("large", config({**FILES, "offload_param": NVME}, **FP32)),
    "all in files, bf16": ("large", config({**FILES, "offload_param": NVME})),
}
HYBRID_TRAFFIC = {
    "groups of 2": ("llama", config({**SMALL, "mics_shard_size": 2}, **FP32)),
    "second shards": ("gpt2", config({**SMALL, "zero_hpz_partition_size": 2})),
    "codes": ("gpt2", config({**SMALL, "zero_hpz_partition_size": 2, **QUANTIZED})),
}


def make(name: str) -> torch.nn.Module:
    if name != "large":
        return build(name)
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(1024, 1100), torch.nn.ReLU(), torch.nn.Linear(1100, 1024)
    )


def moved(
    rank: int, world_size: int, cases: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, dict[str, int]]:
    """Return the bytes that this rank moves in the second step of each case, as messages and
    requests have them.
    """
    sent, exchange, start = Counter(), Communicator._exchange, ScratchFile._start

    def send(self, name, group, tag, parts, received):
        sent[name] += sum(parts[place].nbytes for place in group.others)
        return exchange(self, name, group, tag, parts, received)

    def transfer(self, mapped, host, is_read, after=None):
        sent[READ if is_read else WRITTEN] += mapped.nbytes
        return start(self, mapped, host, is_read, after)

    counts = (
        mock.patch.object(Communicator, "_exchange", send),
        mock.patch.object(ScratchFile, "_start", transfer),
    )
    with counts[0], counts[1]:
        return {
            case: _moved_by(rank, world_size, sent, *settings) for case, settings in cases.items()
        }


def end_reads(engine: zero.ZeroEngine) -> None:
    """Wait for what is read for the next step."""
    updates = engine.optimizer._updates
    updates.wait()
    for values in updates._ahead.values():
        values.wait()


def _moved_by(
    rank: int, world_size: int, sent: Counter, name: str, settings: dict[str, Any]
) -> dict[str, int]:
    engine, found = zero.initialize(model=make(name), config=settings)[0], Counter()
    steps = settings["gradient_accumulation_steps"]
    inputs = torch.randn(6, 1024, dtype=engine.settings.compute_dtype)
    data = [{"input": inputs}] * 2 * steps if name == "large" else batches(name, 2 * steps)
    for number, batch in enumerate(data):
        if number == steps:
            end_reads(engine)
            sent.clear()
            blocking, before = Counter(engine.comm.bytes), Counter(traffic.MOVED)
        rows = {key: value.chunk(world_size)[rank] for key, value in batch.items()}
        output = engine(**rows)
        loss = output.float().square().mean() if name == "large" else output.loss
        engine.backward(loss)
        if number == len(data) - 1:
            found[GATHERS] = sent.pop("all_gather", 0)
        engine.step()
    found[WHOLE] = (
        (engine.comm.bytes - blocking)["all_to_all"] if engine.optimizer.whole is not None else 0
    )
    found[REFRESH] = sent.pop("all_gather", 0)
    found[GRADIENTS] = sum(
        sent.pop(name, 0) for name in ("reduce_scatter", "reduce_replicas", "all_to_all")
    )
    end_reads(engine)
    engine.destroy()
    # The monitor's numbers are those of the messages and requests.
    counted = traffic.MOVED - before
    assert counted == Counter({NETWORK: found.total(), READ: sent[READ], WRITTEN: sent[WRITTEN]})
    return found | sent


@pytest.mark.parametrize(
    ("cases", "ranks"), [(TRAFFIC, 2), (HYBRID_TRAFFIC, 4)], ids=["2 ranks", "4 ranks"]
)
def test_the_traffic_is_what_a_rank_sends_reads_and_writes(cases, ranks):
    every = run_on(ranks, moved, cases)
    for case, (name, settings) in cases.items():
        links = estimate(make(name), load_config(settings), Question(ranks)).traffic.links
        predicted = links[NETWORK] + Counter(
            {link: links[link].total() for link in (READ, WRITTEN)}
        )
        most = {
            cause: max(found[case][cause] for found in every)
            for cause in {*predicted, *every[0][case]}
        }
        if settings["zero_optimization"]["stage"] == 0:  # the second half of an all-reduce
            most[GRADIENTS] += most.pop(GATHERS)
        assert predicted == Counter(most), case


def test_following_real_calls_gives_the_same_traffic():
    """With tokens, a traced forward and backward is followed, else the modules in the order in
    which they were made.
    """
    name, settings = TRAFFIC["stage 3, few live"]
    made, settings = build(name), load_config(settings)
    made.config.architectures = [type(made).__name__]
    traced = estimate(
        build_fake(made.config, settings.compute_dtype), settings, Question(2, 3, 7)
    ).traffic
    plain = estimate(made, settings, Question(2)).traffic
    assert traced.links == plain.links and traced.operations > plain.operations == 0


@pytest.mark.parametrize("kind", TYPES)
def test_every_named_optimizer_has_an_estimate(kind):
    known = {"SGD": 0, "Adagrad": 1, "Lion": 1, "RMSprop": 1, "ASGD": 1, "Muon": 1}
    model = torch.nn.Sequential(
        torch.nn.Identity(), torch.nn.Linear(16, 16, bias=False), torch.nn.Identity()
    )
    settings = config({"stage": 0}, optimizer={"type": kind, "params": {}})
    parts = estimate(model, load_config(settings), Question(1)).parts[DEVICE]
    assert parts.get("optimizer state", 0) == 4 * 256 * known.get(kind, 2)


def test_auto_is_what_transformers_fills_in(tmp_path):
    build("llama").save_pretrained(tmp_path)
    auto = dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
        "auto",
    )
    settings = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3} | auto}
    filled = fill_in(load_config(settings, allow_auto=True), read_config(str(tmp_path)))
    section = filled.zero_optimization
    assert (section.reduce_bucket_size, section.stage3_prefetch_bucket_size) == (900, 810)
    assert (
        section.stage3_param_persistence_threshold == 300 and filled.compute_dtype == torch.bfloat16
    )
