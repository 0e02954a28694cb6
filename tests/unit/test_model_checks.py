"""Which parameters of a model have another dtype without the engine."""

from __future__ import annotations

import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from zero.model_checks import kept_in_fp32


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2)
        self.investigate = nn.Linear(2, 2)


class Model(nn.Module):
    _keep_in_fp32_modules_strict = ("gate.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Router() for _ in range(2))


def test_names_of_what_transformers_keeps_in_fp32():
    names = ["layers.0.gate.weight", "layers.1.gate.weight"]
    wrapped = nn.ModuleDict({"model": Model()})
    for dtype in (torch.bfloat16, torch.float16):
        assert kept_in_fp32(Model(), dtype) == names
        assert kept_in_fp32(wrapped, dtype) == [f"model.{name}" for name in names]
    assert kept_in_fp32(nn.Linear(2, 2), torch.float16) == []
    small = T5Config(vocab_size=8, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2)
    with torch.device("meta"):
        t5 = T5ForConditionalGeneration(small)
    assert kept_in_fp32(t5, torch.bfloat16) == []
    found = kept_in_fp32(t5, torch.float16)
    assert found and all(name.endswith(".wo.weight") for name in found)
