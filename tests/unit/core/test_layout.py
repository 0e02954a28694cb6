"""zero.core.layout: slots, shards and pieces as arithmetic; which parameters form a group."""

import pytest
import torch
from torch import nn

from zero.core.layout import ALIGNMENT, LEAF_FLAG, GroupLayout, find_blocks, plan_groups

SHAPES = [
    [(1,)],
    [(32,)],
    [(33,), (7, 5), ()],
    [(100, 3), (1,), (64,), (13, 17)],
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shapes", SHAPES)
def test_shards_are_equal_and_cover_every_element_once(shapes, world_size):
    made = GroupLayout([torch.Size(shape) for shape in shapes], world_size)
    assert all(slot.offset % ALIGNMENT == 0 for slot in made.slots)
    assert made.padded - made.numel < ALIGNMENT * (len(shapes) + world_size)
    if len(shapes) == 1:  # it is cut evenly
        assert made.shard_numel == -(-made.numel // world_size)
    else:
        assert made.shard_numel % ALIGNMENT == 0
    assert made.shard_numel * world_size == made.padded
    assert made.numel == sum(torch.Size(shape).numel() for shape in shapes)
    seen = torch.zeros(made.padded, dtype=torch.int)
    for rank in range(world_size):
        low, _high = made.shard_range(rank)
        last = 0
        for piece in made.pieces(rank):
            assert piece.start >= last, "pieces are in the order of the shard"
            last = piece.start + piece.numel
            assert last <= made.shard_numel
            # A piece names the same elements twice: in the shard, and in the parameter.
            at = low + piece.start
            assert at == made.slots[piece.slot].offset + piece.inside
            seen[at : at + piece.numel] += 1
    for slot in made.slots:
        assert (seen[slot.offset : slot.end] == 1).all()
    for start, end in made.gaps:
        assert (seen[start:end] == 0).all()
        seen[start:end] += 1
    assert (seen == 1).all(), "gaps and slots together are the whole buffer"


class Block(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.one = nn.Linear(8, 8, bias=bias)
        self.two = nn.Linear(8, 8, bias=bias)


class Model(nn.Module):
    """A stem, two blocks, a head that is tied with the stem, and a loose parameter."""

    def __init__(self, declare=None):
        super().__init__()
        if declare:
            self._no_split_modules = declare
        self.stem = nn.Linear(8, 10, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.stem.weight
        self.loose = nn.Linear(8, 8, bias=False)


def names(plans):
    return {plan.name: plan.param_names for plan in plans}


def test_a_group_is_a_block_or_a_stray_parameter():
    plans = plan_groups(Model(), persistence_threshold=0)
    block = ["one.weight", "one.bias", "two.weight", "two.bias"]
    assert names(plans) == {
        "stem.weight": ["stem.weight"],
        "blocks.0": [f"blocks.0.{name}" for name in block],
        "blocks.1": [f"blocks.1.{name}" for name in block],
        "loose.weight": ["loose.weight"],
    }


def test_tied_parameters_belong_to_all_their_owners():
    model = Model()
    tied = plan_groups(model, persistence_threshold=0)[0]
    assert tied.shared and tied.modules == [model.stem, model.head]


def test_parameters_tied_within_one_block_belong_to_the_block():
    model = Model()
    model.blocks[0].two.weight = model.blocks[0].one.weight
    block = names(plan_groups(model, persistence_threshold=0))["blocks.0"]
    assert block == ["blocks.0.one.weight", "blocks.0.one.bias", "blocks.0.two.bias"]


def test_declared_blocks_go_before_module_lists():
    assert list(find_blocks(Model()).values()) == ["blocks.0", "blocks.1"]
    assert list(find_blocks(Model(declare=["Linear"])).values()) == [
        "stem", "blocks.0.one", "blocks.0.two", "blocks.1.one", "blocks.1.two", "head", "loose",
    ]  # fmt: skip


def test_parameters_up_to_the_threshold_are_persistent():
    def persistent(threshold, model_threshold=1 << 60):
        plans = plan_groups(Model(), threshold, model_threshold)
        return sorted(name for plan in plans if plan.persistent for name in plan.param_names)

    biases = [f"blocks.{i}.{name}.bias" for i in range(2) for name in ("one", "two")]
    weights = [name.replace("bias", "weight") for name in biases]
    assert persistent(7) == []
    assert persistent(8) == biases
    assert persistent(64) == sorted([*biases, *weights, "loose.weight"])
    assert len(persistent(8, model_threshold=31)) == 3, "as the model's threshold allows"


def test_a_group_has_one_dtype_and_one_requires_grad():
    model = Model()
    model.blocks[0].two.bfloat16()
    model.blocks[1].one.requires_grad_(False)
    plans = plan_groups(model, persistence_threshold=0)
    for plan in plans:
        assert len({(param.dtype, param.requires_grad) for param in plan.params}) == 1
    assert [plan.name for plan in plans].count("blocks.0") == 2
    assert [plan.name for plan in plans].count("blocks.1") == 2


def test_param_groups_lie_together():
    model = Model()
    keys = {param: int(param.dim() == 1) for param in model.parameters()}
    block = names(plan_groups(model, 0, sort_key=keys))["blocks.0"]
    assert block == [
        f"blocks.0.{name}" for name in ("one.weight", "two.weight", "one.bias", "two.bias")
    ]


def test_every_parameter_of_floats_or_codes_is_in_exactly_one_group():
    model = Model()
    model.counts = nn.Parameter(torch.arange(4), requires_grad=False)
    codes = nn.Parameter(torch.zeros(64, 32, dtype=torch.uint8), requires_grad=False)
    model.blocks[0].codes = codes
    model.empty = nn.Parameter(torch.empty(0))
    plans = plan_groups(model, 8)
    planned = [param for plan in plans for param in plan.params]
    expected = [p for p in model.parameters() if p.numel() and p is not model.counts]
    assert len(planned) == len(set(planned)) == len(expected) and set(planned) == set(expected)
    assert [plan.params for plan in plans if plan.packed] == [[codes]]
    below_stage_3 = plan_groups(model, 8, packed_too=False)
    assert {param for plan in below_stage_3 for param in plan.params} == {*expected} - {codes}


class PackedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.zeros(4, 6, 5))


@pytest.mark.parametrize("leaf", [None, "experts", "mixture"])
def test_packed_experts_are_a_group_below_their_block_unless_a_leaf_holds_them(leaf):
    mixture = nn.ModuleDict({"router": nn.Linear(5, 4), "experts": PackedExperts()})
    if leaf is not None:
        setattr(mixture if leaf == "mixture" else mixture["experts"], LEAF_FLAG, True)
    block = nn.ModuleDict({"attention": nn.Linear(5, 5), "mixture": mixture})
    plans = plan_groups(nn.Sequential(nn.ModuleList([block])), persistence_threshold=0)
    layers = ("attention", "mixture.router")
    in_block = [f"0.0.{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    experts = "0.0.mixture.experts.up"
    if leaf is not None:
        assert [plan.param_names for plan in plans] == [[*in_block, experts]]
    else:
        assert [plan.param_names for plan in plans] == [in_block, [experts]]
        assert plans[1].modules == [mixture["experts"]] and not plans[1].shared
