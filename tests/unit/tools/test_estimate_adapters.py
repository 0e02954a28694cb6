"""`zero estimate` of adapters on bases that may be quantized."""

import json

import peft
import pytest
import torch
import transformers
from bitsandbytes import functional

from zero.config import load_config
from zero.errors import UsageError
from zero.integrations.hf.quantized_experts import QuantizedExperts
from zero.tools.estimate.adapters import QuantizedLinear, packed_bytes
from zero.tools.estimate.model import build
from zero.tools.estimate.question import Question, model_folder
from zero.tools.estimate.rank import Estimate, estimate

ROWS, COLUMNS, LAYERS = 256, 128, 2
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
EIGHT_BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True}


SIZES = {
    "hidden_size": COLUMNS, "intermediate_size": ROWS, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip


def llama(**others: object) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], **others)


def found(shape: transformers.PretrainedConfig, adapter: str, stage: int = 1) -> Estimate:
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    model = build(shape, torch.bfloat16, adapter)
    return estimate(model, load_config(settings), Question(1, 1, 16))


def test_the_bytes_of_codes_are_those_of_bitsandbytes():
    weight = torch.randn(ROWS, COLUMNS)
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    assert packed_bytes(weight, {"load_in_8bit": True}) == (codes.nbytes, scales.nbytes)
    for doubly in (False, True):
        options = {"compress_statistics": doubly, "quant_type": "nf4"}
        codes, state = functional.quantize_4bit(weight, **options)
        scales = state.absmax.nbytes + (state.state2.absmax.nbytes if doubly else 0)
        quantization = {"load_in_4bit": True, "bnb_4bit_use_double_quant": doubly}
        assert packed_bytes(weight, quantization) == (codes.nbytes, scales)


@pytest.mark.parametrize("quantization", [FOUR_BITS, EIGHT_BITS])
def test_a_quantized_base_takes_the_bytes_of_its_codes(quantization):
    plain, packed = found(llama(), "8"), found(llama(quantization_config=quantization), "8")
    assert packed.elements == plain.elements
    linear = LAYERS * (4 * COLUMNS * COLUMNS + 3 * ROWS * COLUMNS)
    shapes = [(COLUMNS, COLUMNS)] * 4 + [(ROWS, COLUMNS)] * 2 + [(COLUMNS, ROWS)]
    weights = [torch.empty(shape) for shape in shapes]
    codes = LAYERS * sum(sum(packed_bytes(weight, quantization)) for weight in weights)
    saved = plain.parts["device"]["parameters"] - packed.parts["device"]["parameters"]
    assert saved == pytest.approx(2 * linear - codes, rel=0.01)
    # The same adapter is trained, and as many products are computed.
    assert packed.parts["device"]["optimizer state"] == plain.parts["device"]["optimizer state"]
    assert packed.traffic.operations == plain.traffic.operations


@pytest.mark.parametrize("doubly", [False, True])
def test_experts_take_the_bytes_with_which_stage_3_loads_them(doubly):
    experts, rows = 4, 2 * ROWS
    section = FOUR_BITS | {"bnb_4bit_use_double_quant": doubly}
    shape = transformers.MixtralConfig(**SIZES, num_local_experts=experts)
    shape.architectures, shape.quantization_config = ["MixtralForCausalLM"], section
    taken = [found(shape, "8", stage) for stage in (2, 3)]
    elements = LAYERS * experts * (rows + ROWS) * COLUMNS
    values = torch.randn(experts, rows + ROWS, COLUMNS)
    made = QuantizedExperts.of(values, "nf4", doubly)
    tensors, _ = made.__tensor_flatten__()
    packed = LAYERS * sum(getattr(made, name).nbytes for name in tensors)
    assert packed <= (0.53 if doubly else 0.5625) * elements
    at_2, at_3 = (each.parts["device"]["parameters"] for each in taken)
    assert at_2 - at_3 == pytest.approx(2 * elements - packed, rel=0.01)
    assert taken[0].elements == taken[1].elements
    # Each is unpacked before it is used.
    assert taken[0].traffic.operations == taken[1].traffic.operations


def test_the_head_and_named_layers_are_not_quantized():
    section = FOUR_BITS | {"llm_int8_skip_modules": ["down_proj"]}
    model = build(llama(quantization_config=section), torch.bfloat16, "4")
    layers = {name.removesuffix(".base_layer"): layer for name, layer in model.named_modules()}
    for name, is_quantized in {
        "lm_head": False,
        "model.layers.0.mlp.down_proj": False,
        "model.layers.0.mlp.up_proj": True,
        "model.layers.1.self_attn.q_proj": True,
    }.items():
        assert isinstance(layers[name], QuantizedLinear) is is_quantized


def test_an_adapter_comes_from_pefts_file(tmp_path):
    peft.LoraConfig(r=8, target_modules=["q_proj"]).save_pretrained(tmp_path)
    base = found(llama(), str(tmp_path))
    trained = LAYERS * 8 * 2 * COLUMNS
    assert base.parts["device"]["optimizer state"] == pytest.approx(8 * trained, rel=0.02)
    assert found(llama(), str(tmp_path / "adapter_config.json")).parts == base.parts
    with pytest.raises(UsageError, match="--adapter"):
        model_folder(str(tmp_path))
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(values | {"target_modules": ["no"]}))
    with pytest.raises(UsageError, match="--adapter .*no"):
        found(llama(), str(tmp_path))


def test_what_is_not_estimated_is_refused():
    with pytest.raises(UsageError, match="--adapter 16"):
        found(llama(quantization_config=FOUR_BITS), "")
    with pytest.raises(UsageError, match="gptq"):
        found(llama(quantization_config={"quant_method": "gptq", "bits": 4}), "8")
