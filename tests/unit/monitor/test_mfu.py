"""What a model computes for each token, and the peaks of devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.parity.models import build
from zero.monitor.mfu import PEAKS, operations_per_token, peak, peak_of

# Names as torch.cuda.get_device_name gives them.
NAMES = {
    "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100 80GB PCIe": 312, "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835.5, "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA B200": 2250, "NVIDIA L4": 121, "NVIDIA L40S": 362, "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090": 71, "NVIDIA A10": 125, "AMD Instinct MI300X": 1307.4, "AMD Instinct "
"MI250X": 191.5,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_of_a_device(name: str):
    assert peak_of(name, torch.bfloat16) == peak_of(name, torch.float16) == NAMES[name] * 1e12


UNKNOWN = "A10G", "A100-SXM4-40GB MIG 1g.5gb", "GeForce RTX 4090 Laptop GPU", "L40"


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_devices_are_not_taken_for_known_ones(name: str):
    assert peak_of(f"NVIDIA {name}", torch.bfloat16) is None


def test_types_have_peaks_of_their_own():
    assert peak_of("Tesla V100-SXM2-32GB", torch.float16) == 125e12
    assert peak_of("Tesla V100-SXM2-32GB", torch.bfloat16) is None  # it has no groups for it
    assert peak_of("Tesla T4", torch.float32, tf32=True) == 8.1e12  # nor for TF32
    a100 = "NVIDIA A100-SXM4-80GB"
    assert peak_of(a100, torch.float32) == 19.5e12
    assert peak_of(a100, torch.float32, tf32=True) == 156e12
    for each in PEAKS.values():
        assert each["fp16"] >= (each["tf32"] or 0) and each["fp16"] > each["fp32"]
    assert peak(torch.device("cpu"), torch.float32) is None


def operations(model: nn.Module) -> tuple[int, int]:
    return operations_per_token(SimpleNamespace(module=model, comm=SimpleNamespace(model=None)))


def test_embeddings_count_where_they_are_multiplied():
    tied = build("gpt2")
    looked_up = sum(each.weight.numel() for each in (tied.transformer.wte, tied.transformer.wpe))
    others = sum(param.numel() for param in tied.parameters()) - looked_up
    assert operations(tied) == (6 * (others + tied.lm_head.weight.numel()), 0)
    untied = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False))
    assert operations(untied) == (6 * 800, 0)


def test_frozen_weights_have_no_gradients():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    assert operations(model) == (4 * 16 + 6 * 16, 0)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 8
        self.weights = nn.Parameter(torch.zeros(8, 4, 4))


def test_of_experts_those_that_a_token_chooses_count():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), Experts())
    model.config = SimpleNamespace(num_experts_per_tok=2)
    assert operations(model) == (6 * (32 + 2 * 16), 0)
    model[1]._is_expert_parallel = True
    model[1].num_experts = 4
    model[1].weights = nn.Parameter(torch.zeros(4, 4, 4))
    comm = SimpleNamespace(model=SimpleNamespace(world_size=2))
    engine = SimpleNamespace(module=model, comm=comm)
    # Each of two ranks has half of the experts, and both see each token.
    assert operations_per_token(engine) == (6 * (32 + 16), 0)
