"""What the table at the start says of quantized weights, and which formats are refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zero.build import describe_quantized
from zero.errors import UsageError
from zero.integrations.hf.quantized_experts import QuantizedExperts
from zero.model_checks import check_model


def described(model, stage=3, shard_buffers=None, ranks=2, dtype=torch.float32):
    section = SimpleNamespace(stage=stage, stage3_shard_buffers=shard_buffers)
    settings = SimpleNamespace(zero_optimization=section, compute_dtype=dtype)
    return "".join(f"\n{line}" for line in describe_quantized(model, settings, ranks))


def frozen(*shape, dtype=torch.uint8):
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


def quantized():
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.weight = frozen(64, 64)
    return model


def test_the_table_says_what_each_rank_holds_and_names_layers_that_compute_in_fp32():
    """Which is the default of bitsandbytes, whatever the configuration says."""
    model = quantized()
    taken = "\nquantized weights take 4,096 bytes, 2,048 on each of 2 ranks"
    assert described(model) == taken
    assert "all of them on every rank, because only stage 3" in described(model, stage=2)
    model.layer.compute_dtype = torch.float32
    assert described(model) == taken
    said = "1 quantized layers compute in fp32, which is slow: set bnb_4bit_compute_dtype=torch.bf"
    assert said in described(model, dtype=torch.bfloat16)
    model.layer.compute_dtype = torch.bfloat16
    assert described(model, dtype=torch.bfloat16) == taken


def test_the_table_says_what_experts_take():
    model = quantized()
    model.experts = nn.Module()
    model.experts.num_experts = 4
    values = torch.randn(4, 16, 64)
    model.experts.down_proj = nn.Parameter(values, requires_grad=False)
    line = "\nexperts that are not quantized: 'experts.down_proj', 16,384 bytes, 8,192 on each of 2"
    assert line in described(model)
    pytest.importorskip("bitsandbytes")
    packed = QuantizedExperts.of(values, "nf4", False)
    model.experts.down_proj = nn.Parameter(packed, requires_grad=False)
    table = described(model)
    assert "take 6,400 bytes (2,304 of them for fused experts), 3,200 on each" in table
    assert "not quantized" not in table


def test_buffers_of_codes_are_sharded_if_transformers_has_quantized_the_model():
    model = nn.Module()
    model.register_buffer("qweight", torch.zeros(64, 64, dtype=torch.int32))
    assert described(model) == "\nnot sharded: 'qweight', 16,384 bytes on every rank"
    model.is_quantized = True
    assert "take 16,384 bytes, 8,192 on each" in described(model)
    assert "not sharded: 'qweight'" in described(model, shard_buffers=False)


def test_formats_that_would_be_wrong_are_refused_by_name():
    model = nn.Module()
    model.weight = nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)
    with pytest.raises(UsageError, match=r"'weight' has the layout torch.sparse_coo"):
        check_model(model)
    model = nn.ModuleDict({"layer": nn.Module()})
    model["layer"].meta = {"view_as_float": True}
    with pytest.raises(UsageError, match=r"layer 'layer' shows its codes .* view_as_float=False"):
        check_model(model)
    model.ct_decompress_hook = model.register_forward_pre_hook(lambda model, args: None)
    model["layer"].meta = {}
    with pytest.raises(UsageError, match="compressed-tensors .*dequantize=True"):
        check_model(model)
