"""What a model computes for each token, and the peaks of devices."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zero.monitor.mfu import PEAKS, operations_per_token, peak, peak_of

NAMES = {
    "NVIDIA A100-SXM4-80GB": 312, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756,
    "NVIDIA H200 NVL": 835.5, "NVIDIA L4": 121, "NVIDIA L40S": 362, "NVIDIA A10": 125,
    "NVIDIA GeForce RTX 4090": 165.2, "AMD Instinct MI300X": 1307.4,
}  # fmt: skip


def test_the_peak_of_a_device():
    for name, teraflops in NAMES.items():
        assert peak_of(name, torch.bfloat16) == peak_of(name, torch.float16) == teraflops * 1e12


def test_other_devices_are_not_taken_for_known_ones():
    for name in ("A10G", "A100-SXM4-40GB MIG 1g.5gb", "GeForce RTX 4090 Laptop GPU", "L40"):
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


def test_frozen_weights_have_no_gradients():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].requires_grad_(False)
    assert operations(model) == (4 * 16 + 6 * 16, 0)


class Experts(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.num_experts = number
        self.weights = nn.Parameter(torch.zeros(number, 4, 4))


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_experts_those_that_a_token_chooses_count(ranks):
    """Each of two ranks has half of the experts, and both see each token."""
    model = nn.Sequential(nn.Linear(4, 8, bias=False), Experts(8 // ranks))
    model.config = SimpleNamespace(num_experts_per_tok=2)
    model[1]._is_expert_parallel = ranks > 1
    comm = SimpleNamespace(model=SimpleNamespace(world_size=ranks) if ranks > 1 else None)
    engine = SimpleNamespace(module=model, comm=comm)
    assert operations_per_token(engine) == (6 * (32 + 2 // ranks * 16), 0)
