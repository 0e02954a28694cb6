"""Pipelines against plain torch in one process on the same global batches: losses and gradient
norms.

Micro-batches have other shapes than whole batches, and their gradients are summed in another order.
So the numbers are equal within 1e-6, not bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from transformers import LlamaForCausalLM

import zero
from tests.dist import training
from tests.dist.training import Curve, adamw, one_group, relative, train_plain, trainable
from tests.parity.models import VOCABULARY, build, small
from tests.processes import run_on
from tests.releases import needs
from zero.checkpoint.models import consolidate
from zero.errors import UsageError
from zero.parallel.pipeline import IGNORED, Pipeline, split

pytestmark = needs("torch", "2.9", "its schedules do not evaluate")

ROWS, LENGTH, MICRO_BATCHES, CLIP = 16, 9, 4, 0.5
STEPS, MANY_STEPS, SAVED_AFTER = 3, 8, 2
# Groups are gathered for each use, and small parameters always there: both kinds are at work.
STAGE3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 200,
    "stage3_max_live_parameters": 10_000,
}

SLICES = {"activation_checkpointing": {"batch_slices": 2}}


OPTIONS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"intermediate_size": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    # With tensor parallelism its experts are shared: see `start`.
    "mixtral": {"intermediate_size": 8, "num_local_experts": 4},
}


def model_of(kind: str, tied: bool = False) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY + 1, "intermediate_size": 36, "num_hidden_layers": 4}
    return small(kind, tie_word_embeddings=tied, **sizes | OPTIONS.get(kind, {}))


class Case(NamedTuple):
    kind: str
    tied: bool
    schedule: type
    zero: dict[str, Any]
    steps: int = STEPS
    checkpointing: bool = False
    sections: dict[str, Any] = {}

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return model_of(self.kind, self.tied)


CASES = {
    "Llama, tied, 1F1B, stage 0": Case("llama", True, Schedule1F1B, {"stage": 0}),
    "Llama, tied, GPipe, stage 1": Case("llama", True, ScheduleGPipe, {"stage": 1}),
    "Llama, tied, interleaved, stage 2": Case("llama", True, ScheduleInterleaved1F1B, {"stage": 2}),
    "Llama, tied, 1F1B, stage 3": Case("llama", True, Schedule1F1B, STAGE3, MANY_STEPS),
    # Its owners do not exchange shards of its gradient: it persists together with others, of which
    # the two stages have different ones.
    "Llama, tied and persistent, stage 3": Case(
        "llama", True, Schedule1F1B, STAGE3 | {"stage3_param_persistence_threshold": 10_000}
    ),
    "Llama, interleaved, stage 3": Case(
        "llama", False, ScheduleInterleaved1F1B, STAGE3, sections=SLICES
    ),
    "GPT, GPipe, stage 3, activations again": Case(
        "gpt_neox", False, ScheduleGPipe, STAGE3, checkpointing=True
    ),
    "GPT, tied, interleaved, stage 3, offload": Case(
        "gpt_neox",
        True,
        ScheduleInterleaved1F1B,
        STAGE3 | {key: {"device": "cpu"} for key in ("offload_param", "offload_optimizer")},
    ),
    "GPT, 1F1B, stage 1": Case("gpt_neox", False, Schedule1F1B, {"stage": 1}),
    "Mixtral, 1F1B, stage 3": Case("mixtral", False, Schedule1F1B, STAGE3),
}
# There layers of GPT-NeoX return tuples, and each expert of Mixtral is a module.
BEFORE_5 = Version(transformers.__version__) < Version("5")
if BEFORE_5:
    CASES = {name: case for name, case in CASES.items() if case.kind != "gpt_neox"}
EIGHT_RANKS = ["Llama, tied, interleaved, stage 2", "Mixtral, 1F1B, stage 3"]
SAVED = "Llama, tied, 1F1B, stage 3"


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels. Micro-batches differ in how many labels count."""
    generator, made = torch.Generator().manual_seed(11), []
    for _ in range(steps):
        ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
        left_out = torch.rand(ids.shape, generator=generator) < 0.3
        made.append((ids, ids.masked_fill(left_out, IGNORED)))
    return made


def config_of(case: Case, data_ranks: int, **sections: Any) -> dict[str, Any]:
    return {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": ROWS // data_ranks // MICRO_BATCHES,
        "gradient_clipping": CLIP,
        "zero_optimization": case.zero,
        **case.sections,
        **sections,
    }


def start(
    case: Case, world_size: int, tensor: int = 1, **sections: Any
) -> tuple[zero.ZeroEngine, Pipeline, Any]:
    """A pipeline of two stages, each of `tensor` ranks, beside as many others as there are."""
    data = world_size // 2 // tensor
    kind = zero.comm.world.compute_device().type
    mesh = init_device_mesh(kind, (2, data, tensor), mesh_dim_names=("pp", "shard", "tp"))
    model = split(case.model(), mesh, 2 if case.schedule is ScheduleInterleaved1F1B else 1)
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = adamw(one_group(trainable(model)))
    if case.kind == "mixtral" and tensor > 1:
        sections |= {"expert_parallel": {"enabled": True, "autoep_size": tensor}}
    config = config_of(case, data, **sections)
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config, mesh=mesh)
    return engine, Pipeline(engine, mesh, LENGTH, case.schedule), mesh


def own(rows: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The rows of this rank's pipeline."""
    return rows.chunk(mesh.mesh.shape[1])[mesh.get_coordinate()[1]]


def train(case: Case, pipeline: Pipeline, mesh: Any, first: int, end: int) -> Curve:
    curve = Curve()
    for ids, labels in batches(end)[first:]:
        curve.losses.append([pipeline.step(own(ids, mesh), own(labels, mesh))])
        curve.norms.append(pipeline.engine.get_global_grad_norm())
    return curve


def piped(
    rank: int, world_size: int, names: list[str], folder: str, tensor: int = 1
) -> list[Curve]:
    found = []
    for name in names:
        case = CASES[name]
        engine, pipeline, mesh = start(case, world_size, tensor)
        curve = train(case, pipeline, mesh, 0, SAVED_AFTER)
        if name == SAVED:
            engine.save_checkpoint(folder)
        rest = train(case, pipeline, mesh, SAVED_AFTER, case.steps)
        ids, labels = batches(1)[0]
        rest.losses.append([pipeline.evaluate(own(ids, mesh), own(labels, mesh))])
        assert engine.global_steps == case.steps
        assert engine.micro_steps == case.steps * MICRO_BATCHES
        found.append(Curve(curve.losses + rest.losses, curve.norms + rest.norms))
        # A block is held until all its experts have had their gradients.
        if not (BEFORE_5 and case.kind == "mixtral"):
            assert engine.residency.peak <= STAGE3["stage3_max_live_parameters"]
        engine.destroy()
    return found


def plain(rank: int, world_size: int, names: list[str]) -> dict[str, Curve]:
    found = {}
    for name in names:
        case, model = CASES[name], CASES[name].model()
        if case.kind == "mixtral":  # in fp32 its norms are rounded by more than those of the ranks
            model.double()
            if hasattr(model, "set_experts_implementation"):  # else they have only this one
                model.set_experts_implementation("eager")
        data = [{"input_ids": ids, "labels": labels} for ids, labels in batches(case.steps)]
        found[name] = train_plain(model, data, CLIP)
        with torch.no_grad():
            found[name].losses.append([model(**data[0]).loss.item()])
        if name == SAVED:
            found[name].weights = train_plain(case.model(), data[:SAVED_AFTER], CLIP).weights
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, Curve]:
    (found,) = run_on(1, plain, list(CASES))
    return found


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory) -> tuple[list[list[Curve]], Path]:
    folder = tmp_path_factory.mktemp("pipeline")
    return run_on(4, piped, list(CASES), str(folder)), folder


def compare(curves: list[Curve], expected: Curve) -> None:
    # Every rank knows loss and norm of the whole model.
    assert all(curve == curves[0] for curve in curves)
    assert min(curves[0].norms) > CLIP, "clipping must be at work"
    assert len(curves[0].norms) == len(expected.norms)
    assert relative(curves[0].mean_losses(), expected.mean_losses()) < 1e-6
    assert relative(curves[0].norms, expected.norms) < 1e-6


def compare_all(of_ranks: list[list[Curve]], names: list[str], expected: dict) -> None:
    for name, curves in zip(names, zip(*of_ranks, strict=True), strict=True):
        compare(list(curves), expected[name])


def test_two_stages_of_two_ranks_each(on_four_ranks, expected):
    compare_all(on_four_ranks[0], list(CASES), expected)


@needs("transformers", "5.23", "it does not shard a model that exists by its plan")
def test_three_dimensions(expected, tmp_path):
    """2 x 2 x 2 ranks: stages, data, tensor."""
    compare_all(run_on(8, piped, EIGHT_RANKS, str(tmp_path), 2), EIGHT_RANKS, expected)


# -- checkpoints


def without_stages(rank: int, world_size: int, folder: str) -> Curve:
    case, curve = CASES[SAVED], Curve()
    engine, _ = training.start(case.model(), config_of(case, world_size))
    engine.load_checkpoint(folder)
    for ids, labels in batches(STEPS)[SAVED_AFTER:]:
        counted, losses = (labels[:, 1:] != IGNORED).sum(), []
        for part, label in zip(ids.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
            weight = (label[:, 1:] != IGNORED).sum() / counted
            loss = engine(input_ids=part, labels=label).loss * weight
            engine.backward(loss, scale_wrt_gas=False)
            engine.step()
            losses.append(loss.item())
        curve.losses.append([sum(losses)])
        curve.norms.append(engine.get_global_grad_norm())
    return curve


def test_a_checkpoint_loads_into_an_engine_without_stages(on_four_ranks, expected):
    """`tests/hf/test_examples.py` loads one into other stages."""
    (curve,) = run_on(1, without_stages, str(on_four_ranks[1]))
    wanted = expected[SAVED]
    losses, norms = wanted.mean_losses()[SAVED_AFTER:STEPS], wanted.norms[SAVED_AFTER:STEPS]
    assert relative(curve.mean_losses(), losses) < 1e-6 and relative(curve.norms, norms) < 1e-6


def test_a_checkpoint_makes_one_model_folder(on_four_ranks, expected, tmp_path):
    consolidate(on_four_ranks[1], tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found, wanted = model.state_dict(), expected[SAVED].weights
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # Adam's first steps: lr 1e-3 for any gradient.
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=0)


# -- what all stages must decide together


def overflowing(rank: int, world_size: int) -> list[tuple[float, bool, float]]:
    case = CASES["Llama, tied, 1F1B, stage 3"]
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    engine, pipeline, mesh = start(case, world_size, fp16=fp16)
    found = []
    for ids, labels in batches(12):
        loss = pipeline.step(own(ids, mesh), own(labels, mesh))
        found.append((loss, engine.was_step_applied(), engine.loss_scale()))
    weight = engine.module.get_input_embeddings().weight
    with zero.GatheredParameters([weight]):
        found.append((weight.double().sum().item(), True, 0.0))
    return found


def test_all_stages_skip_an_overflowing_step_and_owners_of_a_tied_weight_stay_equal():
    first, second = run_on(2, overflowing)
    assert first == second
    applied = [applied for _, applied, _ in first[:-1]]
    assert not applied[0] and applied[-1], "the scale is too large at first"


def disagreeing(rank: int, world_size: int) -> str:
    case = CASES["Llama, tied, GPipe, stage 1"]
    engine, pipeline, mesh = start(case, world_size)
    engine.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank)
    with pytest.raises(UsageError) as error:
        train(case, pipeline, mesh, 0, 1)
    return str(error.value)


def test_stages_with_different_learning_rates_are_named():
    for text in run_on(2, disagreeing):
        assert "param group 0, lr: 0.001 on rank 0, 0.002 on rank 1" in text


# -- mistakes


def failing(rank: int, world_size: int) -> tuple[bool, bool]:
    """Rank 0's last backward raises an exception; then both ranks go on with the next batch."""
    case = CASES[SAVED]
    engine, pipeline, mesh = start(case, world_size)
    (ids, labels), *_ = batches(1)
    calls: list[torch.Tensor] = []

    def raises(grad: torch.Tensor) -> None:
        calls.append(grad)
        if len(calls) == MICRO_BATCHES:
            raise RuntimeError("planted")

    if rank == 0:
        weight = next(param for _, param in trainable(engine.module))
        handle = weight.register_hook(raises)
        with pytest.raises(RuntimeError, match="Failed to run stage backward"):
            pipeline.step(own(ids, mesh), own(labels, mesh))
        handle.remove()
    else:
        pipeline._run(pipeline.schedule.step, own(ids, mesh), own(labels, mesh), {})
    engine.zero_grad()
    engine.hooks.forget_broken_pass()
    pipeline.step(own(ids, mesh), own(labels, mesh))
    is_one = (engine.global_steps, engine.micro_steps) == (1, MICRO_BATCHES)
    return engine.was_step_applied(), is_one


def test_after_an_exception_the_next_batch_is_a_step():
    assert run_on(2, failing, timeout=60.0) == [(True, True)] * 2


def mistakes(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "shard"))
    without = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    with zero.Init(config_dict_or_path=config_of(CASES["Llama, tied, GPipe, stage 1"], 2)):
        sharded = model_of("llama")
    few = config_of(CASES["Llama, tied, GPipe, stage 1"], 1)
    few |= {"gradient_accumulation_steps": 1, "train_batch_size": 4}

    def pipeline(parts: int, cut: bool = True, **changes: Any) -> Pipeline:
        model = split(model_of("llama"), mesh, parts) if cut else model_of("llama")
        config = few | changes
        engine, *_ = zero.initialize(
            model=model, optimizer=adamw(one_group(trainable(model))), config=config, mesh=mesh
        )
        return Pipeline(engine, mesh, LENGTH)

    enough = {"gradient_accumulation_steps": 2, "train_batch_size": 8}
    wrong: dict[str, Callable[[], object]] = {
        r"2 does not divide the number of layers in model.layers, 3": lambda: split(
            build("llama"), mesh
        ),
        "T5ForConditionalGeneration has no plan": lambda: split(build("t5"), mesh),
        "Gemma2ForCausalLM changes hidden states": lambda: split(model_of("gemma2"), mesh),
        "one named 'pp' is missing": lambda: split(model_of("llama"), without),
        "zero.Init has sharded": lambda: split(sharded, mesh),
        "(?s)gradient_accumulation_steps is 1.*2 ranks": lambda: pipeline(1),
        "Schedule1F1B runs one stage per rank": lambda: pipeline(2, **enough),
        "call zero.parallel.pipeline.split": lambda: pipeline(1, cut=False, **enough),
    }
    for text, mistake in wrong.items():
        with pytest.raises(UsageError, match=text):
            mistake()


def test_mistakes_are_named():
    run_on(2, mistakes)
