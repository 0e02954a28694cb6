"""Saving and loading through the engine: the state is equal bit for bit, with any number of ranks
and any settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zero
from tests.dist.training import (
    Curve,
    Make,
    adamw,
    assert_equal,
    assert_same_weights,
    curve_on,
    ds_config,
    one_group,
    relative,
    sgd_engine,
    start,
    train_zero,
    two_groups,
)
from tests.parity.models import batches, build
from tests.parity.test_whole_tensor import APOLLO, MAKE
from tests.processes import on_ranks, run_on
from tests.tolerance import rounding
from zero.checkpoint.files import Slice, open_checkpoint
from zero.checkpoint.folder import locate
from zero.checkpoint.manifest import read_manifest
from zero.errors import UsageError

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
WARMUP = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 6}}
}
OTHER_CUTS = {
    "stage3_param_persistence_threshold": 0,
    "sub_group_size": 300,
    "reduce_bucket_size": 500,
}
STEPS = 3


def stored(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the newest checkpoint in `folder`, flattened, by its key."""
    reader = open_checkpoint(locate(Path(folder), None))
    tensors = {}
    for key, entry in reader.manifest.tensors.items():
        tensors[key] = torch.full((entry.numel,), float("nan")).to(reader.dtype(key))
        reader.read([Slice.whole(key, tensors[key])])
    return tensors


def train_save_train(
    rank: int, world_size: int, model: str, config: dict, folder: str, make: Make = adamw
) -> Curve:
    """Save in the middle of a run. Return what the uninterrupted run does after the save."""
    engine, _ = start(build(model), config, make=make)
    data = batches(model, 2 * STEPS)
    train_zero(engine, data[:STEPS])
    engine.save_checkpoint(folder)
    curve = train_zero(engine, data[STEPS:])
    engine.wait_for_checkpoint()  # ranks of `run_on` end without the exit functions that do this
    return curve


def load_train(
    rank: int, world_size: int, model: str, config: dict, folder: str, make: Make = adamw
) -> Curve:
    """Load into a model with other weights, write what was loaded to `folder`/again, and go on."""
    torch.manual_seed(99)
    fresh = build(model)
    with torch.no_grad():
        for param in fresh.parameters():
            param.normal_()
    engine, _ = start(fresh, config, make=make)
    path, _ = engine.load_checkpoint(folder)
    assert path == str(Path(folder) / f"global_step{STEPS}")
    engine.save_checkpoint(Path(folder) / f"again{world_size}")
    return train_zero(engine, batches(model, 2 * STEPS)[STEPS:])


OPTIMIZERS: dict[str, Make] = {"AdamW": adamw} | MAKE
LATE = BF16 | {"checkpoint": {"async_save": True}}


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        *(("AdamW", sections) for sections in ({}, BF16, FP16 | WARMUP)),
        *(("torch's Adafactor", LATE), ("Muon", LATE), pytest.param("APOLLO", LATE, marks=APOLLO)),
    ],
)
def test_same_world_size_continues_bit_for_bit(name, sections, tmp_path):
    given = "llama", ds_config(clip=1.0, **sections), str(tmp_path), OPTIMIZERS[name]
    straight = curve_on(2, train_save_train, *given)
    assert_equal(curve_on(2, load_train, *given), straight)


MICS = {"mics_shard_size": 2}


# (optimizer, ranks and section of the writer, and those of the reader). Each stage and each number
# of ranks is on both sides.
@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    [
        ("AdamW", (2, {}), (1, {})),
        ("AdamW", (2, {}), (3, {"stage": 0})),
        ("AdamW", (1, {"stage": 0}), (4, {})),
        ("AdamW", (3, {"stage": 2}), (2, {"stage": 1})),
        ("AdamW", (4, {"stage": 1}), (2, {"stage": 2})),
        ("AdamW", (3, {"stage": 0}), (2, {})),
        ("AdamW", (4, MICS), (2, {})),
        ("AdamW", (2, {"stage": 2}), (4, MICS)),
        ("AdamW", (4, MICS | {"stage": 1}), (2, {"mics_shard_size": 1})),
        ("AdamW", (2, {"mics_shard_size": 1}), (4, {"zero_hpz_partition_size": 2})),
        ("torch's Adafactor", (4, MICS), (2, {"mics_shard_size": 1, "stage": 1})),
        ("Whitened", (2, {}), (3, {"stage": 1})),
        ("Adafactor, lr", (3, {"stage": 2}), (1, {})),
        ("Muon", (1, {}), (2, {"stage": 0})),
    ],
    ids=str,
)
def test_other_ranks_stages_groups_and_cuts_hold_the_same_state(name, writer, reader, tmp_path):
    (written, section), (read, other) = writer, reader
    config, others = ds_config(clip=1.0, **section), ds_config(clip=1.0, **OTHER_CUTS | other)
    given = str(tmp_path), OPTIMIZERS[name]
    straight = curve_on(written, train_save_train, "llama", config, *given)
    resumed = curve_on(read, load_train, "llama", others, *given)
    again = tmp_path / f"again{read}"
    assert_same_weights(stored(again), stored(tmp_path))
    if name not in ("Muon", "Whitened"):
        # The first multiplies in bf16, the second does not store its count of steps. Batches are
        # split differently. 1000 is about the inner lengths of three layers, the head and the loss,
        # both ways.
        close = rounding(torch.float32, 1000, STEPS)
        assert relative(resumed.mean_losses(), straight.mean_losses()) <= close
    for folder in (tmp_path, again):
        for key, entry in read_manifest(locate(folder, None)).tensors.items():
            numel = sum(each.numel for each in entry.slices)
            assert numel == entry.numel, f"{key} is written once"


def regroup(rank: int, world_size: int, folder: str, save: bool) -> list[dict]:
    config = ds_config(bf16={"enabled": True})
    engine, optimizer = start(build("t5"), config, one_group if save else two_groups)
    if save:
        train_zero(engine, batches("t5", 2))
        optimizer.param_groups[0]["lr"] = 0.125
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
        engine.save_checkpoint(Path(folder) / "again")
    return [{key: group[key] for key in ("lr", "weight_decay")} for group in optimizer.param_groups]


def test_other_param_groups_hold_the_same_state(tmp_path):
    (saved,) = run_on(2, regroup, str(tmp_path), True)[0]
    assert saved == {"lr": 0.125, "weight_decay": 0.1}
    # The learning rate comes from the checkpoint. The other settings of a group stay those of the
    # running script.
    expected = [{"lr": 0.125, "weight_decay": 0.1}, {"lr": 0.125, "weight_decay": 0.0}]
    assert run_on(3, regroup, str(tmp_path), False) == [expected] * 3
    assert_same_weights(stored(tmp_path / "again"), stored(tmp_path))


class Odd(nn.Module):
    """A frozen matrix, a buffer, tied weights, a 0-dim parameter and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.frozen = nn.Linear(5, 7, bias=False).requires_grad_(False)
        self.last = nn.Linear(7, 5, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.order = nn.Parameter(torch.arange(7), requires_grad=False)
        self.register_buffer("offset", torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.first(x))[:, self.order]
        return (self.last(hidden) * self.scale + self.offset.to(x.dtype)).float().square().mean()


def odd_engine(seed: int, threshold: int) -> zero.ZeroEngine:
    """With a buffer that a forward has replaced by a view that is not contiguous."""
    torch.manual_seed(seed)
    model = Odd()
    model.register_buffer("transposed", torch.zeros(4, 3))
    config = ds_config(bf16={"enabled": True}, stage3_param_persistence_threshold=threshold)
    engine, _ = start(model, config)
    model.transposed = torch.randn(3, 4).t()
    return engine


def odd_run(rank: int, world_size: int, folder: str) -> set[bool]:
    """Whether the parameters of an engine that loads what another one saves are equal."""
    engine = odd_engine(3, 0)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        loss = engine(torch.randn(4, 7, generator=generator).bfloat16())
        engine.backward(loss)
        engine.step()
    engine.module.offset.add_(1)
    with torch.no_grad():
        engine.module.order.copy_(engine.module.order.flip(0))
    client = {"epoch": 3, "pair": (1, 2.5), 7: torch.ones(2, 2).half(), "none": None}
    engine.save_checkpoint(folder, client_state=client)

    other = odd_engine(4, 10**5)
    _, state = other.load_checkpoint(folder)
    assert state.keys() == client.keys() and state["pair"] == (1, 2.5)
    assert torch.equal(state[7], client[7])
    assert torch.equal(other.module.offset, engine.module.offset)
    assert torch.equal(other.module.transposed, engine.module.transposed)
    assert not other.module.transposed.is_contiguous()
    assert torch.equal(other.module.order, engine.module.order)
    assert (other.global_steps, other.micro_steps, other.skipped_steps) == (2, 2, 0)
    with zero.GatheredParameters([*engine.parameters(), *other.parameters()]):
        return set(map(torch.equal, engine.module.parameters(), other.module.parameters()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_tied_scalar_and_unsharded_values(world_size, tmp_path):
    assert run_on(world_size, odd_run, str(tmp_path)) == [{True}] * world_size
    tensors = stored(tmp_path)
    # Each weight is stored once: frozen ones in their own dtype, trained ones as fp32 masters.
    weights = {key: each.dtype for key, each in tensors.items() if key[:9] != "optimizer"}
    assert weights == {
        "weights/first.weight": torch.float32,
        "weights/first.bias": torch.float32,
        "weights/scale": torch.float32,
        "weights/frozen.weight": torch.bfloat16,
        "plain/order": torch.int64,
        "plain/offset": torch.float32,
        "plain/transposed": torch.float32,
    }
    moments = {key for key in tensors if key.startswith("optimizer/exp_avg/")}
    assert {key.split("/")[2] for key in moments} == {"first.weight", "first.bias", "scale"}
    assert read_manifest(locate(tmp_path, None)).tied == {"last.weight": "first.weight"}


@on_ranks(2)
def test_frozen_parameters_may_be_left_out(rank, world_size, tmp_path):
    engine, other = odd_engine(3, 10**5), odd_engine(4, 10**5)
    kept = [other.module.frozen.weight.detach().clone(), other.module.order.flip(0)]
    other.module.order.data.copy_(kept[1])
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    other.load_checkpoint(tmp_path)
    assert not {"weights/frozen.weight", "plain/order"} & stored(tmp_path).keys()
    assert torch.equal(other.module.frozen.weight, kept[0])
    assert torch.equal(other.module.order, kept[1])
    assert torch.equal(other.module.first.weight, engine.module.first.weight)


def progress(engine: zero.ZeroEngine) -> tuple:
    scheduler = engine.lr_scheduler.last_batch_iteration
    return engine.global_steps, engine.scaler.scale, scheduler, bool(engine.optimizer.state)


@on_ranks(2)
def test_parts_of_a_checkpoint(rank, world_size, tmp_path):
    config = ds_config(**FP16, **WARMUP)
    engine, _ = start(build("gpt2"), config)
    train_zero(engine, batches("gpt2", 4))
    engine.save_checkpoint(tmp_path)
    saved = engine._zero3_consolidated_16bit_state_dict() or {}
    steps, scale, scheduler, _ = progress(engine)
    assert (steps, scheduler) == (4, 3) and scale != 2.0**8
    for option, expected in {
        "load_module_only": (0, 2.0**8, -1, False),
        "load_optimizer_states": (4, 2.0**8, 3, False),
        "load_lr_scheduler_states": (4, scale, -1, True),
    }.items():
        engine, _ = start(build("gpt2"), config)
        engine.load_checkpoint(tmp_path, **{option: option == "load_module_only"})
        assert_same_weights(engine._zero3_consolidated_16bit_state_dict() or {}, saved)
        assert progress(engine) == expected


@on_ranks(2)
def test_engine_without_optimizer_takes_the_weights(rank, world_size, tmp_path):
    trained, _ = start(build("gpt2"), ds_config())
    train_zero(trained, batches("gpt2", 2))
    trained.save_checkpoint(tmp_path)
    engine = zero.initialize(model=build("gpt2"), config=ds_config())[0]
    engine.load_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path, tag="weights")
    with pytest.raises(UsageError, match="holds no optimizer state"):
        trained.load_checkpoint(tmp_path)
    expected, found = (each._zero3_consolidated_16bit_state_dict() for each in (trained, engine))
    assert_same_weights(found or {}, expected or {})
    assert {key.split("/")[0] for key in stored(tmp_path)} == {"weights"}


@on_ranks(2)
def test_random_states_of_every_rank(rank, world_size, tmp_path):
    engine, _ = start(build("t5"), ds_config())
    torch.manual_seed(rank)
    engine.save_checkpoint(tmp_path)
    expected = torch.rand(3)
    engine.load_checkpoint(tmp_path)
    assert torch.equal(torch.rand(3), expected)
    # The Trainer stores random states in its folder, and restores them later by itself.
    before = torch.get_rng_state()
    if rank == 0:
        (tmp_path / "rng_state_0.pth").touch()
    torch.distributed.barrier()
    engine.load_checkpoint(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


@on_ranks(2)
def test_refusals_name_what_is_wrong_on_every_rank(rank, world_size, tmp_path):
    engine, _ = start(build("t5"), ds_config())
    assert engine.load_checkpoint(tmp_path) == (None, {})
    engine.save_checkpoint(tmp_path)
    other, _ = start(build("gpt2"), ds_config())
    sgd = sgd_engine(build("t5"))
    # Rank 1 fails; all ranks get the error.
    state = {"f": print if rank else 1}
    acts: dict[str, Callable[[], object]] = {
        "'a/b'": lambda: engine.save_checkpoint(tmp_path, tag="a/b"),
        "rank 1: client_state.f: a builtin_function_or_method cannot be stored": (
            lambda: engine.save_checkpoint(tmp_path, client_state=state)
        ),
        "no checkpoint 'global_step8'; the newest earlier intact checkpoint is": (
            lambda: engine.load_checkpoint(tmp_path, tag="global_step8")
        ),
        "load_module_strict=False": lambda: other.load_checkpoint(tmp_path),
        "the checkpoint's optimizer is AdamW, the present one SGD": (
            lambda: sgd.load_checkpoint(tmp_path)
        ),
        "custom_load_fn": lambda: engine.load_checkpoint(tmp_path, custom_load_fn=print),
    }
    for expected, act in acts.items():
        with pytest.raises(UsageError, match=re.escape(expected)) as caught:
            act()
        assert caught.value.__cause__ is None, "one traceback says it"
    sgd.load_checkpoint(tmp_path, load_optimizer_states=False)


@pytest.mark.parametrize(
    ("validation", "expected"),
    [
        ("FAIL", "different tags: of_rank_0, of_rank_1; give"),
        ("warn", "latest, of_rank_0, zero_to_fp32.py"),
        ("Ignore", "latest, of_rank_0, zero_to_fp32.py"),
    ],
)
@on_ranks(2)
def test_tags_that_differ(rank, world_size, tmp_path, validation, expected):
    config = ds_config() | {"checkpoint": {"tag_validation": validation}}
    engine, _ = start(build("t5"), config)
    try:
        engine.save_checkpoint(tmp_path, tag=f"of_rank_{rank}")
    except ValueError as error:
        said = str(error)
    else:
        said = ", ".join(sorted(path.name for path in tmp_path.iterdir() if path.name[0] != "."))
    assert expected in said
