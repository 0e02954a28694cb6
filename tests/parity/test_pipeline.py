"""Pipelines against plain torch in one process on the same global batches: losses and gradient
norms.

Micro-batches have other shapes than whole batches, and their gradients are summed in another order.
So the numbers are equal within 1e-6, not bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from transformers import LlamaForCausalLM

import zero
from tests.dist.training import Curve, adamw, one_group, relative, trainable
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
TWO_RANKS = ["Llama, tied, 1F1B, stage 3", "GPT, tied, interleaved, stage 3, offload"]
# There layers of GPT-NeoX return tuples, and each expert of Mixtral is a module.
BEFORE_5 = Version(transformers.__version__) < Version("5")
if BEFORE_5:
    CASES = {name: case for name, case in CASES.items() if case.kind != "gpt_neox"}
    TWO_RANKS = TWO_RANKS[:1]
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
        steps = engine.global_steps, engine.micro_steps
        rest.losses.append([pipeline.evaluate(own(ids, mesh), own(labels, mesh))])
        assert (
            (engine.global_steps, engine.micro_steps)
            == steps
            == (case.steps, case.steps * MICRO_BATCHES)
        )
        found.append(Curve(curve.losses + rest.losses, curve.norms + rest.norms))
        # A block is held until all its experts have had their gradients.
        if not (BEFORE_5 and case.kind == "mixtral"):
            assert engine.residency.peak <= STAGE3["stage3_max_live_parameters"]
        engine.destroy()
    return found


def plain(rank: int, world_size: int, names: list[str]) -> dict[str, Curve]:
    return {name: train_plain(CASES[name]) for name in names}


def train_plain(case: Case) -> Curve:
    model, curve = case.model(), Curve()
    if (
        case.kind == "mixtral"
    ):  # in fp32 its norms are rounded by up to 1.1e-6: more than those of the ranks
        model.double()
        if hasattr(model, "set_experts_implementation"):  # else they have only this one
            model.set_experts_implementation("eager")
    optimizer = adamw(one_group(trainable(model)))
    for ids, labels in batches(case.steps):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        curve.losses.append([loss.item()])
        curve.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        if len(curve.norms) == SAVED_AFTER:
            curve.weights = {name: value.clone() for name, value in model.state_dict().items()}
    ids, labels = batches(1)[0]
    with torch.no_grad():
        curve.losses.append([model(input_ids=ids, labels=labels).loss.item()])
    return curve


@pytest.fixture(scope="module")
def expected() -> dict[str, Curve]:
    (found,) = run_on(1, plain, list(CASES))
    return found


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory) -> tuple[dict[str, list[Curve]], Path]:
    folder = tmp_path_factory.mktemp("pipeline")
    of_ranks = run_on(4, piped, list(CASES), str(folder))
    return dict(zip(CASES, zip(*of_ranks, strict=True), strict=True)), folder


def compare(curves: list[Curve], expected: Curve, first: int = 0) -> None:
    assert all(curve == curves[0] for curve in curves), (
        "every rank knows loss and norm of the whole model"
    )
    assert min(curves[0].norms) > CLIP, "clipping must be at work"
    assert len(curves[0].norms) == len(expected.norms) - first
    assert relative(curves[0].mean_losses(), expected.mean_losses()[first:]) < 1e-6
    assert relative(curves[0].norms, expected.norms[first:]) < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_two_stages_of_two_ranks_each(name, on_four_ranks, expected):
    compare(on_four_ranks[0][name], expected[name])


def test_two_stages_of_one_rank_each(expected, tmp_path):
    for name, curves in zip(
        TWO_RANKS, zip(*run_on(2, piped, TWO_RANKS, str(tmp_path)), strict=True), strict=True
    ):
        compare(curves, expected[name])


@needs("transformers", "5.23", "it does not shard a model that exists by its plan")
def test_three_dimensions(expected, tmp_path):
    """2 x 2 x 2 ranks: stages, data, tensor."""
    for name, curves in zip(
        EIGHT_RANKS, zip(*run_on(8, piped, EIGHT_RANKS, str(tmp_path), 2), strict=True), strict=True
    ):
        compare(curves, expected[name])


def owners_train(rank: int, world_size: int, sections: dict) -> tuple[Curve, set[int], int]:
    """A curve, how many elements the owners of the tied weight exchange, and how many it has."""
    case = CASES["Llama, tied, 1F1B, stage 3"]
    case = case._replace(zero=STAGE3 | sections)
    engine, pipeline, mesh = start(case, world_size)
    weight = engine.module.get_input_embeddings().weight if rank in (0, 3) else None
    exchanged: set[int] = set()
    reduce = dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        exchanged.add(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    with mock.patch.object(zero.parallel.pipeline.dist, "all_reduce", noted):
        curve = train(case, pipeline, mesh, 0, STEPS)
    return curve, exchanged, 0 if weight is None else weight.numel()


def test_owners_of_a_tied_weight_exchange_shards_of_its_gradient(expected):
    """Not the whole gradient, unless the weight is persistent together with others, of which the
    two stages have different ones.
    """
    wanted = expected["Llama, tied, 1F1B, stage 3"]
    cut = Curve(wanted.losses[:STEPS], wanted.norms[:STEPS])
    apart = run_on(4, owners_train, {})
    compare([curve for curve, *_ in apart], cut)
    together = run_on(4, owners_train, {"stage3_param_persistence_threshold": 10_000})
    compare([curve for curve, *_ in together], cut)
    numel = apart[0][2]
    assert numel // 2 in apart[0][1] and numel not in apart[0][1]
    assert numel in together[0][1]


# -- checkpoints


def resumed(rank: int, world_size: int, folder: str, schedule: type, save_to: str) -> Curve:
    case = CASES[SAVED]._replace(schedule=schedule, zero={"stage": 1})
    engine, pipeline, mesh = start(case, world_size)
    assert engine.load_checkpoint(folder)[0] is not None and engine.global_steps == SAVED_AFTER
    engine.save_checkpoint(save_to)
    return train(case, pipeline, mesh, SAVED_AFTER, STEPS)


def resumed_without_stages(rank: int, world_size: int, folder: str, saved_again: str) -> Curve:
    case, curve = CASES[SAVED], Curve()
    for each in (folder, saved_again):
        model = case.model()
        config = config_of(case, world_size)
        engine, *_ = zero.initialize(
            model=model, optimizer=adamw(one_group(trainable(model))), config=config
        )
        engine.load_checkpoint(each)
        for ids, labels in batches(STEPS)[SAVED_AFTER:]:
            whole = (labels[:, 1:] != IGNORED).sum()
            losses = []
            for part, label in zip(
                ids.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True
            ):
                loss = (
                    engine(input_ids=part, labels=label).loss
                    * (label[:, 1:] != IGNORED).sum()
                    / whole
                )
                engine.backward(loss, scale_wrt_gas=False)
                engine.step()
                losses.append(loss.item())
            curve.losses.append([sum(losses)])
            curve.norms.append(engine.get_global_grad_norm())
    return curve


def test_a_checkpoint_loads_into_any_number_of_stages(on_four_ranks, expected, tmp_path):
    """Into four stages on two ranks, at another ZeRO stage; and from there into an engine without
    stages.
    """
    folder, wanted = on_four_ranks[1], expected[SAVED]
    cut = Curve(wanted.losses[:STEPS], wanted.norms[:STEPS])
    curves = run_on(2, resumed, str(folder), ScheduleInterleaved1F1B, str(tmp_path))
    compare(curves, cut, SAVED_AFTER)
    (curve,) = run_on(1, resumed_without_stages, str(folder), str(tmp_path))
    twice = [*cut.losses[SAVED_AFTER:], *cut.losses[SAVED_AFTER:]]
    assert relative(curve.mean_losses(), [loss for (loss,) in twice]) < 1e-6
    assert relative(curve.norms, cut.norms[SAVED_AFTER:] * 2) < 1e-6


def test_a_checkpoint_makes_one_model_folder(on_four_ranks, expected, tmp_path):
    consolidate(on_four_ranks[1], tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found, wanted = model.state_dict(), expected[SAVED].weights
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, atol=2e-5, rtol=0
        )  # Adam's first steps: lr 1e-3 for any gradient


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
    return engine.was_step_applied(), (engine.global_steps, engine.micro_steps) == (
        1,
        MICRO_BATCHES,
    )


def test_after_an_exception_the_next_batch_is_a_step():
    assert run_on(2, failing, timeout=60.0) == [(True, True)] * 2


def mistakes(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "shard"))
    without = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    with zero.Init(config_dict_or_path=config_of(CASES["Llama, tied, GPipe, stage 1"], 2)):
        sharded = model_of("llama")
    few = config_of(CASES["Llama, tied, GPipe, stage 1"], 1) | {
        "gradient_accumulation_steps": 1,
        "train_batch_size": 4,
    }

    def pipeline(parts: int, cut: bool = True, **changes: Any) -> Pipeline:
        model = split(model_of("llama"), mesh, parts) if cut else model_of("llama")
        config = few | changes
        engine, *_ = zero.initialize(
            model=model, optimizer=adamw(one_group(trainable(model))), config=config, mesh=mesh
        )
        return Pipeline(engine, mesh, LENGTH)

    enough = {"gradient_accumulation_steps": 2, "train_batch_size": 8}
    for text, wrong in (
        (
            r"2 does not divide the number of layers in model.layers, 3",
            lambda: split(build("llama"), mesh),
        ),
        ("T5ForConditionalGeneration has no plan for a pipeline", lambda: split(build("t5"), mesh)),
        (
            "Gemma2ForCausalLM changes hidden states or logits out",
            lambda: split(model_of("gemma2"), mesh),
        ),
        ("one named 'pp' is missing", lambda: split(model_of("llama"), without)),
        ("zero.Init has sharded", lambda: split(sharded, mesh)),
        ("(?s)gradient_accumulation_steps is 1.*2 ranks", lambda: pipeline(1)),
        ("Schedule1F1B runs one stage per rank", lambda: pipeline(2, **enough)),
        ("call zero.parallel.pipeline.split", lambda: pipeline(1, cut=False, **enough)),
    ):
        with pytest.raises(UsageError, match=text):
            wrong()


def test_mistakes_are_named():
    run_on(2, mistakes)
