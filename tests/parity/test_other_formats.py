"""LoRA on bases in formats whose libraries need a GPU, with stand-ins that keep their tensors where
those do, and on bases of quanto, which runs on CPUs and is not among the requirements.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.parity.test_quantized import batches, mean, saved_base, settings, steps, trainable
from tests.processes import run_on
from tests.tolerance import rounding
from zero.core.quantized_weights import quantized_tensors

# About the sum of the inner lengths of the model in a forward; a rank has half of the batch.
TERMS = 1000


class GPTQ(nn.Module):
    """The buffers of gptqmodel: eight codes in an int32, by groups of 64 inputs."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        groups = linear.weight.T.detach().reshape(-1, 64, linear.out_features)
        scales = groups.abs().amax(1, keepdim=True) / 7
        codes = ((groups / scales).round() + 8).to(torch.int32).reshape(linear.weight.T.shape)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32).view(1, 8, 1)
        packed = (codes.view(-1, 8, linear.out_features) << shifts).sum(1, dtype=torch.int32)
        self.register_buffer("qweight", packed)
        self.register_buffer("scales", scales.squeeze(1).half())
        self.register_buffer("qzeros", torch.full((len(groups), len(scales) // 8), 0x77777777))
        self.register_buffer("g_idx", (torch.arange(len(codes)) // 64).int())
        self.shifts = shifts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = (self.qweight.unsqueeze(1) >> self.shifts) & 15
        codes = codes.reshape(-1, self.qweight.shape[1]) - 8
        return x @ (codes * self.scales[self.g_idx].float())


class FP8(nn.Module):
    """The parameters of transformers' fine-grained FP8, by blocks of 64 by 64."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        rows, columns = linear.weight.shape
        blocks = linear.weight.detach().reshape(rows // 64, 64, columns // 64, 64)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        codes = (blocks / scale).to(torch.float8_e4m3fn).reshape(rows, columns)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale[:, 0, :, 0].clone(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight_scale_inv.repeat_interleave(64, 0).repeat_interleave(64, 1)
        return x @ (self.weight.float() * scale).T


def replaced(base: Path, kind: type[nn.Module]) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for block in model.model.layers:
        for name, linear in list(block.mlp.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(block.mlp, name, kind(linear))
    model.is_quantized = True  # as transformers says of models that it has quantized
    return model


def by_quanto(base: Path) -> Any:
    from optimum.quanto import freeze, qint8, quantize
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    quantize(model, weights=qint8, exclude="lm_head")
    freeze(model)
    return model


# The model, and the library that it needs.
KINDS = {
    "buffers of GPTQ": (lambda base: replaced(base, GPTQ), "torch"),
    "fine-grained FP8": (lambda base: replaced(base, FP8), "torch"),
    "quanto": (by_quanto, "optimum.quanto"),
}


def with_adapter(base: Path, kind: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = KINDS[kind][0](base)
    torch.manual_seed(0)
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian", r=4)
    return get_peft_model(model, lora).train()


def plain(rank: int, world_size: int, base: Path, kind: str) -> list[float]:
    model = with_adapter(base, kind)
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2, weight_decay=0.0)
    losses = []
    for ids in batches():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trainable(model), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(rank: int, world_size: int, base: Path, kind: str) -> Any:
    model = with_adapter(base, kind)
    whole = sum(
        each.tensor.numel() * each.tensor.element_size()
        for module in model.modules()
        for each in quantized_tensors(module, None)
    )
    engine, *_ = zero.initialize(
        model=model, model_parameters=trainable(model), config=settings(world_size)
    )
    losses = steps(engine, rank, world_size)
    return losses, sum(group.shard.nbytes for group in engine.groups if group.packed), whole


def is_missing(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is None
    except ModuleNotFoundError:  # of the package around it
        return True


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_one_process_and_each_rank_holds_its_share(
    kind: str, tmp_path: Path
) -> None:
    if is_missing(KINDS[kind][1]):
        pytest.skip(f"needs {KINDS[kind][1]}")
    base = saved_base(tmp_path, kind)
    [expected] = run_on(1, plain, base, kind)
    runs = run_on(2, trained, base, kind)
    assert mean(runs) == pytest.approx(expected, rel=rounding(torch.float32, TERMS))
    weights = 2 * 3 * 128 * 256
    for _, held, whole in runs:
        assert whole >= weights / 2
        assert whole / 2 <= held <= whole / 2 + 4096
