"""Optimizers: the class for each configuration, its settings, and that pieces are updated like
whole tensors.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import Adafactor

from zero.config import load_config
from zero.config.optim import ELEMENTWISE, TYPES, OptimizerParams, optimizer_defaults
from zero.integrations.deepspeed import optimizers
from zero.integrations.deepspeed.optimizers import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLion,
    Lion,
    build_optimizer,
)
from zero.optim import muon, update
from zero.optim.elementwise import is_elementwise, require_possible
from zero.optim.muon import MuonWithAdamW

# Each kind is tested with these settings too. A kind without an entry is tested with its defaults.
SETTINGS = {
    "Adam": {"adam_w_mode": False, "weight_decay": 0.1},
    "AdamW": {"weight_decay": 0.1, "amsgrad": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.1},
    "Lion": {"betas": [0.9, 0.99], "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True, "alpha": 0.9},
    "NAdam": {"momentum_decay": 0.01},
    "Rprop": {"etas": [0.4, 1.1], "step_sizes": [1e-5, 1.0]},
    "ASGD": {"t0": 2.0},
}


OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def section(kind, **params):
    return {"optimizer": {"type": kind, "params": params}}


def configured(kind, offloaded=False, **params):
    config = load_config(section(kind, **params) | (OFFLOADED if offloaded else {}))
    return build_optimizer(config, None, None, nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("kind", "params", "offloaded", "expected", "decoupled"),
    [
        ("Adam", {}, False, FusedAdam, True),
        ("Adam", {"adam_w_mode": False}, False, FusedAdam, False),
        ("AdamW", {"adam_w_mode": False}, True, DeepSpeedCPUAdam, True),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, True, torch.optim.Adam, False),
        ("ADAM", {"torch_adam": True}, False, torch.optim.AdamW, True),
        ("Adagrad", {}, False, torch.optim.Adagrad, None),
        ("adagrad", {}, True, DeepSpeedCPUAdagrad, None),
        ("Lion", {}, False, FusedLion, None),
        ("lion", {}, True, DeepSpeedCPULion, None),
        ("sgd", {}, True, torch.optim.SGD, None),
        ("rmsprop", {}, False, torch.optim.RMSprop, None),
    ],
)
def test_the_class_is_deepspeeds_choice(kind, params, offloaded, expected, decoupled):
    optimizer = configured(kind, offloaded, **params)
    assert type(optimizer) is expected
    assert getattr(optimizer, "adam_w_mode", decoupled) is decoupled
    assert optimizer.param_groups[0].get("decoupled_weight_decay") is decoupled


@pytest.mark.parametrize(
    ("params", "fused"),
    [
        ({}, True),
        ({"fused": False}, False),
        ({"foreach": True}, None),
        ({"torch_adam": True}, None),
    ],
)
def test_adam_is_fused_on_a_gpu_unless_told_otherwise(monkeypatch, params, fused):
    monkeypatch.setattr(optimizers, "compute_device", lambda: torch.device("cuda", 0))
    assert configured("Adam", **params).param_groups[0]["fused"] is fused


class Located(torch.optim.SGD):
    """Records the device of its step count."""

    def step(self):
        (state,) = self.state.values()
        self.found = state["step"].device.type


def test_a_count_of_steps_is_where_a_fused_step_reads_it():
    optimizer = Located([torch.zeros(1)])
    optimizer.param_groups[0]["fused"] = True
    made = update.SubGroupUpdate(optimizer, 1.0, is_plain_adam=False)
    tensor = torch.zeros(3, device="meta")
    sub_group, state = SimpleNamespace(group_index=0, master=tensor), {"step": torch.tensor(2.0)}
    made(SimpleNamespace(sub_group=sub_group, master=tensor, grad=tensor, state=state))
    assert made._twin.found == "meta"


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("AdamW", {}, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("AdamW", {}, {"eps": 1e-8, "fused": None}),
        ("AdamW", {"torch_adam": True}, {"lr": 1e-3, "weight_decay": 0.01}),
        ("Adagrad", {}, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
        ("Lion", {}, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("SGD", {"lr": 0.5, "momentum": 0.9}, {"lr": 0.5, "momentum": 0.9, "nesterov": False}),
    ],
)
def test_defaults_are_deepspeeds(kind, params, expected):
    group = configured(kind, **params).param_groups[0]
    assert {key: group[key] for key in expected} == expected


CUTS = [5, 15, 10]  # the engine cuts at arbitrary places


@pytest.mark.parametrize("by_user", [False, True], ids=["configured", "user's own"])
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_pieces_with_gaps_update_as_the_whole_parameter(kind, by_user):
    config = load_config(section(kind, **SETTINGS.get(kind, {})))
    plain = dict(config.optimizer.params)
    plain.pop("adam_w_mode", None)
    make = partial(Lion if kind == "Lion" else getattr(torch.optim, kind), lr=0.1, **plain)
    model = nn.Linear(6, 4, bias=False)
    whole = nn.Parameter(model.weight.detach().clone())
    reference = make([whole])
    optimizer = build_optimizer(config, make if by_user else None, None, model)

    inside = torch.cat([torch.arange(10), torch.arange(13, 27)])
    master = torch.zeros(30).index_copy(0, inside, whole.detach().view(-1))
    pieces = master.split(CUTS)
    optimizer.param_groups[0] |= {"lr": 0.1, "params": [*pieces]}
    for step in range(4):
        whole.grad = torch.linspace(-1, 2, 24).roll(step).view(4, 6)
        gradient = torch.zeros(30).index_copy(0, inside, whole.grad.view(-1))
        for piece, part in zip(pieces, gradient.split(CUTS), strict=True):
            piece.grad = part
        optimizer.step()
        reference.step()
    torch.testing.assert_close(master[inside], whole.detach().view(-1))
    assert not master.index_fill(0, inside, 0.0).any(), "the gaps stay"
    assert (master[inside] != model.weight.detach().view(-1)).all()


def test_every_setting_of_torchs_optimizers_is_a_known_key():
    for kind in TYPES:
        assert optimizer_defaults(kind).keys() <= OptimizerParams.model_fields.keys(), kind


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_correction_of_the_bias(decoupled):
    """torch's Adam has no such mode; after very many steps there is nothing to correct."""
    ours = configured("Adam", bias_correction=False, adam_w_mode=decoupled, weight_decay=0.1)
    param = ours.param_groups[0]["params"][0]
    start = param.detach().clone()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    copied = nn.Parameter(start.clone())
    reference = kind([copied], lr=1e-3, weight_decay=0.1)
    zeros = {"exp_avg": torch.zeros_like(start), "exp_avg_sq": torch.zeros_like(start)}
    reference.state[copied] = {"step": torch.tensor(1e7)} | zeros
    for step in range(3):
        param.grad = copied.grad = torch.linspace(1, -2, param.numel()).view_as(param) * (step + 1)
        ours.step()
        reference.step()
    torch.testing.assert_close(param, copied, rtol=1e-5, atol=1e-7)
    assert (param - start).abs().max() > 1e-3


def test_lamb_scales_each_tensor_by_the_norms_of_weight_and_update():
    optimizer = configured("lamb", lr=0.1, weight_decay=0.5, max_coeff=2.0, bias_correction=False)
    weight, bias = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        weight.fill_(2.0)
        bias.zero_()
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    optimizer.step()
    adam = 0.1 / 0.001**0.5  # the moments after one step, without correction
    ratio = 2.0 / (adam + 0.5 * 2.0)
    expected = 2.0 - 0.1 * ratio * (adam + 0.5 * 2.0)
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, expected))
    torch.testing.assert_close(bias.detach(), torch.full_like(bias, -0.1 * adam))


class Prodigy(torch.optim.SGD):
    """A third-party optimizer. The engine knows it by its name."""


class MyProdigy(Prodigy):
    """A subclass of such an optimizer."""


class SlowAdamW(torch.optim.AdamW):
    """A subclass that keeps torch's `step`. So it is element-wise."""


class MyAdamW(torch.optim.AdamW):
    """A subclass with its own `step`. So it may not be element-wise."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "LBFGS cannot be used: it evaluates the model several times"),
        (torch.optim.SparseAdam, "SparseAdam cannot be used: it needs sparse gradients"),
    ],
)
@pytest.mark.parametrize("as_function", [False, True])
def test_an_optimizer_that_cannot_work_is_refused_by_name(make, reason, as_function):
    model = nn.Linear(2, 2, bias=False)
    given = make if as_function else make(list(model.parameters()))
    with pytest.raises(ValueError, match=reason):
        build_optimizer(load_config({}), given, None, model)


def test_sums_over_all_parameters_need_one_process():
    optimizer = MyProdigy([nn.Parameter(torch.ones(2))])
    require_possible(optimizer, 1)
    with pytest.raises(ValueError, match="Prodigy cannot be used: it computes sums over all"):
        require_possible(optimizer, 2)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        *((getattr(torch.optim, kind), True) for kind in ELEMENTWISE if kind != "Lion"),
        *((make, True) for make in (Lion, FusedLion, FusedAdam, DeepSpeedCPUAdam)),
        *((make, True) for make in (DeepSpeedCPUAdagrad, SlowAdamW)),
        *((make, False) for make in (torch.optim.Muon, torch.optim.Adafactor, Adafactor, MyAdamW)),
    ],
)
def test_only_classes_that_are_known_are_element_wise(make, expected):
    assert is_elementwise(make([nn.Parameter(torch.ones(2, 2))])) is expected


# -- Muon


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 6)
        self.lm_head = nn.Linear(6, 5)
        self.filter = nn.Conv1d(2, 2, 1)
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)


def test_muon_takes_the_hidden_matrices_of_each_group():
    model = Block()
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    settings = {"lr": 0.25, "muon_lr": 0.125, "betas": [0.5, 0.75], "momentum": 0.5}
    config = load_config(section("muon", ns_method="gram", **settings))
    optimizer = build_optimizer(config, None, groups, model)
    names = {param: name for name, param in model.named_parameters()}
    keys = "use_muon", "lr", "weight_decay", "momentum", "betas"
    found = [
        ([names[param] for param in group["params"]], *map(group.get, keys))
        for group in optimizer.param_groups
    ]
    rest = ["embed_tokens.weight", "lm_head.weight", "filter.weight"]
    assert found == [
        (["inner.weight"], True, 0.125, 0.5, 0.5, None),
        (rest, False, 0.25, 0.5, None, (0.5, 0.75)),
        (["inner.bias", "lm_head.bias", "filter.bias"], False, 0.25, 0.0, None, (0.5, 0.75)),
    ]


def test_muons_defaults_are_deepspeeds():
    first, second = configured("Muon").param_groups
    assert [first[key] for key in ("lr", "momentum", "weight_decay")] == [0.02, 0.95, 0.0]
    expected = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    assert {key: second[key] for key in expected} == expected
    assert second["decoupled_weight_decay"]
    _, second = configured("Muon", adam_w_mode=False).param_groups
    assert not second["decoupled_weight_decay"]


def test_muon_with_adamw_steps_as_the_two_do():
    matrix, vector = (
        nn.Parameter(torch.linspace(-1, 1, 6).view(shape)) for shape in ((2, 3), (6,))
    )
    own = [nn.Parameter(param.detach().clone()) for param in (matrix, vector)]
    of_muon = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.5}
    of_adamw = {"lr": 0.3, "weight_decay": 0.4, "betas": (0.5, 0.6)}
    groups = [
        {"params": own[1:], "use_muon": False} | of_adamw,
        {"params": own[:1], "use_muon": True} | of_muon,
    ]
    muon = torch.optim.Muon([matrix], **of_muon)
    adamw = torch.optim.AdamW([vector], eps=1e-10, **of_adamw)
    both = MuonWithAdamW(groups)
    for step in range(3):
        for param in (matrix, vector, *own):
            param.grad = torch.linspace(1, -2, 6).view(param.shape) * (step + 1)
        for optimizer in (muon, adamw, both):
            optimizer.step()
        if step == 1:  # torch replaces state and groups
            both.load_state_dict(both.state_dict())
    assert torch.equal(own[0], matrix) and torch.equal(own[1], vector)
    with pytest.raises(ValueError, match="use_muon"):
        MuonWithAdamW([{"params": own}])


def test_muon_without_torchs_own_is_refused(monkeypatch):
    monkeypatch.setattr(muon, "_Muon", torch.optim.Optimizer)
    with pytest.raises(ValueError, match=r"optimizer Muon needs torch 2.9 or newer, and this is"):
        configured("Muon")


@pytest.mark.parametrize(
    "settings", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}]
)
def test_matrices_of_equal_shape_are_multiplied_together(settings, monkeypatch):
    monkeypatch.setattr(muon, "BATCH", 5 * 16 * 24)  # a sixth matrix goes into another batch
    shapes = [(16, 24)] * 6 + [(24, 16)] * 3 + [(16, 16)]
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    own, before = ([nn.Parameter(param.detach().clone()) for param in plain] for _ in range(2))
    optimizers = [
        torch.optim.Muon(plain, lr=0.1, **settings),
        muon.BatchedMuon(own, lr=0.1, **settings),
    ]
    for _ in range(3):
        for one, other in zip(plain, own, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        flops, products = [], []
        for optimizer in optimizers:
            with FlopCounterMode(display=False) as flop_counter, CountOfProducts() as counter:
                optimizer.step()
            flops.append(flop_counter.get_total_flops())
            products.append(counter.count)
        assert products == [len(shapes) * 15, 4 * 15] and flops[0] == flops[1]
    for one, other, former in zip(plain, own, before, strict=True):
        # Products of a batch may add in another order, and their results are rounded to bf16.
        assert (other - one).abs().max() <= 2.0**-6 * (one - former).abs().max()
        states = optimizers[0].state[one], optimizers[1].state[other]
        assert torch.equal(*(state["momentum_buffer"] for state in states))


class CountOfProducts(TorchDispatchMode):
    """Counts matrix products, of one pair or of a batch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))
