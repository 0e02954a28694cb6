"""LoRA on a quantized base: the losses of one process in plain torch, on any number of ranks, and
each rank holds its share of the base.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import train_plain
from tests.parity.models import small
from tests.processes import run_on
from zero.core.quantized_weights import quantized_tensors
from zero.errors import UsageError
from zero.hf import quantize_experts
from zero.offload import tiers

STEPS, BATCH = 4, 12

KINDS = {
    "nf4": "bitsandbytes",
    "nf4 in bf16, nested": "bitsandbytes",
    "fp4": "bitsandbytes",
    "nf4, experts too": "bitsandbytes",
    "nf4, experts too, nested": "bitsandbytes",
    "int8": "bitsandbytes",
    "int8 by torchao": "torchao",
}


def needs(*libraries: str) -> pytest.MarkDecorator:
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {missing}")


INSTALLED = needs("bitsandbytes", "torchao")


def quantization(kind: str) -> Any:
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if kind == "int8 by torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind[:3],
        bnb_4bit_use_double_quant="nested" in kind,
        bnb_4bit_quant_storage=torch.bfloat16 if "bf16" in kind else torch.uint8,
    )


def saved_base(folder: Path, kind: str, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256}
    sizes |= {"head_dim": 32, "max_position_embeddings": 64, "initializer_range": 0.02}
    if "experts" in kind:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        model = small("qwen3_moe", **sizes, **experts)
    else:
        model = small("llama", **sizes)
    model.save_pretrained(folder)
    return folder


def with_adapter(base: Path, kind: str) -> nn.Module:
    """The quantized model with LoRA on all linear layers."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=quantization(kind), dtype=torch.float32
    )
    quantize_experts(model)
    checkpoints = "nested" in kind
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpoints)
    torch.manual_seed(0)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if "experts" in kind else None
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"] if experts else ["q_proj", "v_proj", "down_proj"],
        target_parameters=experts,
        init_lora_weights="gaussian",
        r=4,
    )
    return get_peft_model(model, lora)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 128, (BATCH, 16), generator=generator) for _ in range(STEPS)]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def settings(
    world_size: int, gradient_clipping: float = 1.0, experts: int = 1, **section: object
) -> dict:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // world_size,
        "gradient_clipping": gradient_clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0} | section,
        "expert_parallel": {"enabled": experts > 1, "autoep_size": experts},
    }


def engine_on(base: Path, kind: str, world_size: int, **section: Any) -> Any:
    model = with_adapter(base, kind).train()
    config = settings(world_size, **section)
    if kind == "fp4":
        config["activation_checkpointing"] = {"batch_slices": 2}
    return zero.initialize(model=model, model_parameters=trainable(model), config=config)[0]


def steps(engine: Any, rank: int, world_size: int, which: slice = slice(None)) -> list[float]:
    losses = []
    for ids in batches()[which]:
        part = ids.chunk(world_size)[rank]
        with torch.no_grad():  # bitsandbytes repacks weights here on some CPUs
            engine.eval()
            engine(input_ids=part, labels=part)
            engine.train()
        loss = engine(input_ids=part, labels=part).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained(rank: int, world_size: int, base: Path, kind: str, section: dict) -> Any:
    tiers.LEAST_BYTES_IN_A_FILE = 1
    engine = engine_on(base, kind, world_size, **section)
    if kind == "nf4":  # rank 0 has the names and bits of plain torch
        state, expected = engine._zero3_consolidated_16bit_state_dict(), with_adapter(base, kind)
        whole = {} if state is None else expected.state_dict()
        assert all(torch.equal(state[name], value) for name, value in whole.items())
    losses = steps(engine, rank, world_size)
    packed = [group for group in engine.groups if group.packed]
    in_files = section.get("offload_param", {}).get("device") == "nvme"
    assert all(group.tier.holds_in_file(group.shard) == in_files for group in packed)
    held = sum(group.shard.nbytes for group in packed)
    # Scales too small to be worth a slot may stay; no weights do.
    whole = sum(
        each.tensor.numel() * each.tensor.element_size()
        for module in engine.module.modules()
        for each in quantized_tensors(module)
    )
    return losses, held, whole


def mean(runs: list[Any]) -> list[float]:
    return [sum(of_ranks) / len(runs) for of_ranks in zip(*(run[0] for run in runs), strict=True)]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs(library)) for kind, library in KINDS.items()]
)
def test_losses_are_those_of_one_process_and_each_rank_holds_its_share(kind, tmp_path):
    base = saved_base(tmp_path, kind)
    [expected] = run_on(1, in_plain_torch, base, kind)
    weights = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256)  # with experts there are more
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    for world_size in (1, 2, 3) if kind == "nf4" else (3,):
        runs = run_on(world_size, trained, base, kind, gathers)
        assert mean(runs) == pytest.approx(expected, rel=1e-6)
        for _, held, whole in runs:
            assert whole >= weights * (1 if "int8" in kind else 0.5)
            assert whole / world_size <= held <= whole / world_size + 4096


def in_plain_torch(rank: int, world_size: int, base: Path, kind: str) -> list[float]:
    data = [{"input_ids": ids, "labels": ids} for ids in batches()]
    make = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
    return train_plain(with_adapter(base, kind).train(), data, 1.0, make=make).mean_losses()


@INSTALLED
@pytest.mark.parametrize(
    ("kind", "device"), [("nf4 in bf16, nested", "cpu"), ("nf4, experts too", "nvme")]
)
def test_an_offloaded_base_gives_the_same_losses(kind, device, tmp_path):
    base = saved_base(tmp_path / "base", kind)
    offload = {"device": device}
    if device == "nvme":
        offload |= {"nvme_path": str(tmp_path), "max_in_cpu": 0}
    expected = run_on(2, trained, base, kind, {})
    found = run_on(2, trained, base, kind, {"offload_param": offload})
    assert [run[0] for run in found] == [run[0] for run in expected]


def saves(
    rank: int, world_size: int, base: Path, folder: Path, kind: str, experts: int
) -> list[float]:
    engine = engine_on(base, kind, world_size, experts=experts)
    steps(engine, rank, world_size, slice(2))
    engine.save_checkpoint(str(folder))
    return steps(engine, rank, world_size, slice(2, None))


def resumes(rank: int, world_size: int, base: Path, folder: Path, kind: str) -> list[float]:
    engine = engine_on(base, kind, world_size)
    engine.load_checkpoint(str(folder))
    return steps(engine, rank, world_size, slice(2, None))


@INSTALLED
@pytest.mark.parametrize(("kind", "experts"), [("nf4, experts too", 2), ("int8 by torchao", 1)])
def test_resuming_on_other_ranks(kind, experts, tmp_path):
    """If the experts were divided over 2 ranks, each of the 3 has all of them afterwards."""
    base = saved_base(tmp_path / "base", kind)
    folder = tmp_path / "checkpoints"
    expected = mean([(run,) for run in run_on(2, saves, base, folder, kind, experts)])
    resumed = mean([(run,) for run in run_on(3, resumes, base, folder, kind)])
    assert resumed == pytest.approx(expected, rel=1e-6)
    # The adapters' masters and moments, the frozen embeddings and no layer.
    stored = sum(path.stat().st_size for path in folder.rglob("rank*.safetensors"))
    assert stored < 700_000


# -- experts


Run = tuple[list[float], list[float], int]
CLIP = 0.05


def divided(
    rank: int, world_size: int, base: Path, kind: str, cases: list[tuple[int, dict]]
) -> list[Run]:
    """The losses and norms with experts divided over so many ranks, and the bytes of their codes
    that a rank holds at stage 3.
    """
    found = []
    for experts, section in cases:
        section = section | {"gradient_clipping": CLIP, "experts": experts}
        engine = engine_on(base, kind, world_size, **section)
        for module in engine.module.modules():
            # On some CPUs these compute in bf16 after an evaluation, except at stage 3.
            module.support_avx512bf16_for_cpu = False
        losses, norms = [], []
        for step in range(STEPS):
            losses += steps(engine, rank, world_size, slice(step, step + 1))
            norms.append(engine.get_global_grad_norm())
        codes = [group for group in engine.groups if group.packed and "experts" in group.name]
        found.append((losses, norms, sum(group.shard.nbytes for group in codes)))
        engine.destroy()
    return found


ON_FOUR: list[tuple[int, dict]] = [
    (4, {"stage": 1}),
    (2, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    (2, {"offload_param": {"device": "cpu"}}),
    (4, {}),
]


@INSTALLED
@pytest.mark.parametrize(
    ("ranks", "kind", "cases"),
    [
        (2, "nf4, experts too, nested", [(2, {"stage": 0}), (2, {})]),
        (4, "nf4, experts too", ON_FOUR),
    ],
)
def test_experts_that_are_divided_over_ranks_train_as_without_it(ranks, kind, cases, tmp_path):
    """`autoep_size`: each rank has the codes and scales of its experts."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    of_ranks = run_on(ranks, divided, saved_base(tmp_path, kind), kind, [(1, {}), *cases])
    expected, *found = [[runs[i] for runs in of_ranks] for i in range(len(cases) + 1)]
    _, norms, held = expected[0]
    assert min(norms) > CLIP, "clipping must be at work"
    for (_, section), runs in zip(cases, found, strict=True):
        assert mean(runs) == pytest.approx(mean(expected), rel=1e-6)
        assert all(run[1] == pytest.approx(norms, rel=1e-6) for run in runs)
        shards = [run[2] for run in runs]
        # Each part has a codebook, or scales in fp32, and padding.
        assert max(shards) <= held + 4096 if section.get("stage", 3) == 3 else not any(shards)


def in_use_after_experts(rank: int, world_size: int, base: Path) -> list[int]:
    engine = engine_on(base, "nf4, experts too", world_size)
    found = []

    def count(*_: object) -> None:
        experts = [group for group in engine.groups if group.packed and "experts" in group.name]
        assert len(experts) == 2
        found.append(sum(group.users for group in experts))

    for name, module in engine.module.named_modules():
        if name.endswith("mlp"):
            module.register_forward_hook(count)
    steps(engine, rank, world_size, slice(1))
    return found


@INSTALLED
def test_adapted_experts_are_gathered_for_their_own_layer_alone(tmp_path):
    """PEFT reads the parameter before it calls the module that has it."""
    base = saved_base(tmp_path, "nf4, experts too")
    assert run_on(2, in_use_after_experts, base) == [[0] * 4] * 2


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("width", [1024, 64, 24])
def test_experts_read_as_bitsandbytes_decodes_them(nested, width):
    functional = pytest.importorskip("bitsandbytes.functional")
    from zero.integrations.hf.quantized_experts import QuantizedExperts

    torch.manual_seed(0)
    values = torch.randn(4, width, 56)
    experts = nn.Parameter(QuantizedExperts.of(values, "nf4", nested), requires_grad=False)
    codes = functional.quantize_4bit(values, quant_type="nf4", compress_statistics=nested)
    expected = functional.dequantize_4bit(*codes)
    assert torch.equal(experts * 1, expected)
    assert all(torch.equal(experts[i], expected[i]) for i in (0, 3, -1, torch.tensor(2)))
    parts = [getattr(experts, name) for name in experts.__tensor_flatten__()[0]]
    assert parts[0].nbytes + parts[1].nbytes <= (0.52 if nested else 0.5625) * values.numel() + 8
    for number in (1, 2, 4):
        assert experts.has_parts(number)
        for index, values in enumerate(expected.chunk(number)):
            part = experts.part(index, number)
            assert torch.equal(part * 1, values) and torch.equal(part[-1], values[-1])
            assert part.packed.untyped_storage().nbytes() == values.numel() // 2
    cast = experts.to(torch.bfloat16)
    assert cast.packed is experts.packed and cast[1].dtype == torch.bfloat16
    with pytest.raises(UsageError, match="merge a saved adapter into a 16-bit base"):
        experts.data += 1
    with pytest.raises(UsageError, match="cannot be saved"):
        experts.storage()


def trained_with_little_room(rank: int, world_size: int, base: Path) -> tuple[float, float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization("nf4"))
    quantize_experts(model)
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    ids = batches()[0]
    expected = model(input_ids=ids, labels=ids).loss.item()
    config = settings(world_size, stage3_max_live_parameters=1)
    engine = zero.initialize(model=model, model_parameters=trainable(model), config=config)[0]
    return expected, engine(input_ids=ids, labels=ids).loss.item()


@INSTALLED
def test_experts_without_adapters_are_not_run_in_slices(tmp_path):
    """Slices are of elements, and these groups have bytes."""
    base = saved_base(tmp_path, "nf4, experts too")
    for expected, found in run_on(2, trained_with_little_room, base):
        assert found == expected
