"""Optimizers: the class for each configuration, its settings, and that pieces are updated like
whole tensors.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
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


L2, TORCHS, MOMENTUM = {"adam_w_mode": False}, {"torch_adam": True}, {"lr": 0.5, "momentum": 0.9}
BETAS = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("kind", "params", "device", "expected", "group"),
    [
        ("Adam", {}, None, FusedAdam, BETAS | {"eps": 1e-8, "decoupled_weight_decay": True}),
        ("Adam", L2, None, FusedAdam, {"decoupled_weight_decay": False}),
        ("AdamW", L2, "cpu", DeepSpeedCPUAdam, BETAS | {"decoupled_weight_decay": True}),
        ("Adam", L2 | TORCHS, "cpu", torch.optim.Adam, {"weight_decay": 0.0}),
        ("ADAM", TORCHS, None, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.01}),
        ("adagrad", {}, "cpu", DeepSpeedCPUAdagrad, {"lr": 1e-2, "eps": 1e-10}),
        ("Lion", {}, None, FusedLion, BETAS),
        ("lion", {}, "cpu", DeepSpeedCPULion, BETAS),
        ("sgd", MOMENTUM, "cpu", torch.optim.SGD, MOMENTUM | {"nesterov": False}),
        ("Muon", {}, None, MuonWithAdamW, {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}),
        # On a GPU Adam is fused unless told otherwise.
        ("Adam", {}, CUDA, FusedAdam, {"fused": True}),
        ("Adam", {"fused": False}, CUDA, FusedAdam, {"fused": False}),
        ("Adam", {"foreach": True}, CUDA, FusedAdam, {"fused": None}),
        ("Adam", TORCHS, CUDA, torch.optim.AdamW, {"fused": None}),
    ],
)
def test_class_and_defaults_are_deepspeeds(kind, params, device, expected, group, monkeypatch):
    """`device`: "cpu" if the optimizer is offloaded, or the one that computes."""
    if device is CUDA:
        monkeypatch.setattr(optimizers, "compute_device", lambda: CUDA)
    optimizer = configured(kind, device == "cpu", **params)
    assert type(optimizer) is expected
    assert {key: optimizer.param_groups[0][key] for key in group} == group


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


CUTS = [5, 15, 10]  # the engine cuts at arbitrary places


@pytest.mark.parametrize("way", ["configured", "offloaded", "user's own"])
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_pieces_with_gaps_update_as_the_whole_parameter(kind, way):
    """`OFFLOADED` makes DeepSpeed's classes for host memory of Adam, Adagrad and Lion."""
    raw = section(kind, **SETTINGS.get(kind, {}))
    config = load_config(raw | (OFFLOADED if way == "offloaded" else {}))
    plain = dict(config.optimizer.params)
    plain.pop("adam_w_mode", None)
    make = partial(Lion if kind == "Lion" else getattr(torch.optim, kind), lr=0.1, **plain)
    model = nn.Linear(6, 4, bias=False)
    whole = nn.Parameter(model.weight.detach().clone())
    reference = make([whole])
    optimizer = build_optimizer(config, make if way == "user's own" else None, None, model)

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


@pytest.mark.parametrize("as_function", [False, True])
def test_an_optimizer_that_cannot_work_is_refused_by_name(as_function):
    model = nn.Linear(2, 2, bias=False)
    for make in (torch.optim.LBFGS, torch.optim.SparseAdam):
        given = make if as_function else make(list(model.parameters()))
        with pytest.raises(ValueError, match=f"{make.__name__} cannot be used: it "):
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


@pytest.mark.parametrize("decoupled", [True, False])
def test_beside_muon_adam_has_deepspeeds_defaults(decoupled):
    _, of_adam = configured("Muon", adam_w_mode=decoupled).param_groups
    expected = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    assert {key: of_adam[key] for key in expected} == expected
    assert of_adam["decoupled_weight_decay"] is decoupled


@pytest.mark.parametrize(
    "of_muon",
    [
        {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.5},
        {"lr": 0.1, "weight_decay": 0.0, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    ],
)
def test_muon_with_adamw_steps_as_the_two_do(of_muon, monkeypatch):
    """Matrices of equal shape are multiplied together."""
    monkeypatch.setattr(muon, "BATCH", 5 * 16 * 24)  # a sixth matrix goes into another batch
    torch.manual_seed(0)
    shapes = [(16, 24)] * 6 + [(24, 16)] * 3 + [(16, 16), (7,)]
    plain = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    own, before = ([nn.Parameter(param.detach().clone()) for param in plain] for _ in range(2))
    of_adamw = {"lr": 0.3, "weight_decay": 0.4, "betas": (0.5, 0.6)}
    references = [
        torch.optim.Muon(plain[:-1], **of_muon),
        torch.optim.AdamW(plain[-1:], eps=1e-10, **of_adamw),
    ]
    groups = [{"params": own[-1:], "use_muon": False} | of_adamw]
    groups.append({"params": own[:-1], "use_muon": True} | of_muon)
    both = MuonWithAdamW(groups)
    for step in range(3):
        for one, other in zip(plain, own, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for reference in references:
            reference.step()
        with CountOfProducts() as counter:
            both.step()
        assert counter.count == 4 * 15
        if step == 1:  # torch replaces state and groups
            both.load_state_dict(both.state_dict())
    assert torch.equal(own[-1], plain[-1])
    for one, other, former in zip(plain, own, before, strict=True):
        # Products of a batch may add in another order, and their results are rounded to bf16.
        assert (other - one).abs().max() <= 2.0**-6 * (one - former).abs().max()
    with pytest.raises(ValueError, match="use_muon"):
        MuonWithAdamW([{"params": own}])


def test_muon_without_torchs_own_is_refused(monkeypatch):
    monkeypatch.setattr(muon, "_Muon", torch.optim.Optimizer)
    with pytest.raises(ValueError, match=r"optimizer Muon needs torch 2.9 or newer, and this is"):
        configured("Muon")


class CountOfProducts(TorchDispatchMode):
    """Counts matrix products, of one pair or of a batch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))
