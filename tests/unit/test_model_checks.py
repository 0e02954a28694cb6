"""Which parameters of a model stay in fp32."""

import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from zero.model_checks import IN_FP16, STRICTLY, kept_in_fp32


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


def kept(model: nn.Module, attribute: str) -> list[str]:
    return list(kept_in_fp32(model.modules(), model.named_parameters(), attribute))


def test_names_of_what_transformers_keeps_in_fp32():
    names = ["layers.0.gate.weight", "layers.1.gate.weight"]
    assert kept(Model(), STRICTLY) == names
    assert kept(nn.ModuleDict({"model": Model()}), STRICTLY) == [f"model.{name}" for name in names]
    small = T5Config(vocab_size=8, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2)
    with torch.device("meta"):
        t5 = T5ForConditionalGeneration(small)
    assert kept(t5, STRICTLY) == []
    found = kept(t5, IN_FP16)
    assert found and all(name.endswith(".wo.weight") for name in found)
