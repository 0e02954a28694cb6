"""Optimizers that are not element-wise, against the same optimizer in one process: bit for bit, on
any number of ranks.

The reference adds the gradients of the same micro-batches in the same order. Then it calls the
optimizer's `step()` on whole tensors. So the tests cover the engine's exchange of whole tensors.
With clipping and several ranks or groups, the reference divides by the engine's norms, which equal
its own within rounding."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from transformers import Adafactor

import zero
from tests.dist.training import ds_config, two_groups
from tests.parity.models import assert_bits, batches
from tests.parity.test_fp32 import SMALL
from zero.optim.lamb import Lamb
from zero.optim.muon import MuonWithAdamW, is_hidden_matrix

STEPS = 4


class Whitened(torch.optim.Optimizer):
    """Does what Shampoo does: lists of matrices of other shapes in its state, and new tensors as
    `param.data`.

    It counts steps in an attribute, so `step()` must be called once for all parameters. It makes
    state in `__init__`."""

    def __init__(self, params, lr=1e-1):
        super().__init__(params, {"lr": lr})
        self.steps = 0
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["rows"] = len(param)

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad.reshape(len(param), -1)
                if "sums" not in state:
                    state["sums"] = [torch.eye(size) for size in grad.shape]
                    state["longest"] = None
                left, right = state["sums"]
                left += grad @ grad.T
                right += grad.T @ grad
                state["longest"] = (self.steps, float(grad.norm()))
                update = (
                    left.trace().rsqrt()
                    * grad
                    / right.diagonal().sqrt()
                    / self.steps
                    / state["rows"]
                )
                param.data = param.data - group["lr"] * update.view(param.shape)


def muon(groups):
    """Give hidden matrices to Muon, as `"type": "Muon"` does, but by their shapes alone: names are
    not known here.
    """
    hidden = [
        {"params": [p], "use_muon": is_hidden_matrix(p, "")}
        for group in groups
        for p in group["params"]
    ]
    return MuonWithAdamW(hidden)


def apollo(groups):
    """APOLLO of its authors' package. Projectors of matrices lie in its state, as objects."""
    from apollo_torch import APOLLOAdamW

    projected = {"rank": 2, "update_proj_gap": 3, "scale": 1.0, "proj": "random"}
    projected |= {"proj_type": "std", "scale_type": "channel"}
    made = []
    for group in groups:
        matrices = [param for param in group["params"] if param.dim() == 2]
        others = [param for param in group["params"] if param.dim() != 2]
        made += [group | {"params": matrices} | projected, group | {"params": others}]
    return APOLLOAdamW([group for group in made if group["params"]], lr=1e-2)


APOLLO = pytest.mark.skipif(find_spec("apollo_torch") is None, reason="apollo-torch is missing")

MAKE = {
    "Adafactor, relative step": partial(Adafactor, relative_step=True, warmup_init=True),
    "Adafactor, lr": partial(
        Adafactor, lr=1e-2, relative_step=False, scale_parameter=False, beta1=0.9, weight_decay=0.1
    ),
    "torch's Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "Muon": muon,
    "Lamb": partial(Lamb, lr=1e-2, weight_decay=0.1),
    "Adam without correction": partial(
        Lamb, bias_correction=False, min_coeff=1.0, max_coeff=1.0, adam_w_mode=False
    ),
    "Whitened": Whitened,
    "APOLLO": apollo,
}
SECTIONS = {torch.float32: {}, torch.bfloat16: {"bf16": {"enabled": True}}}


def look(engine: zero.ZeroEngine) -> None:
    assert engine.optimizer.whole is not None and not engine.optimizer.sub_groups
    shares = [each.slot.numel for each in engine.optimizer.whole.own]
    total = sum(each.slot.numel for each in engine.optimizer.whole.tensors)
    is_spread = sum(shares) <= 1.4 * total / engine.comm.world_size
    assert engine.settings.zero_optimization.stage == 0 or is_spread


# (optimizer, model, dtype, ranks, micro-batches in a step, clipping, stage)
CASES = [
    *(
        (name, "llama", torch.float32, 1, 2, 0.5, 3)
        for name in ("Adafactor, lr", "Muon", "Lamb", "Adam without correction")
    ),
    ("Adafactor, relative step", "t5", torch.float32, 2, 2, 0.0, 3),
    ("Adafactor, relative step", "llama", torch.bfloat16, 3, 1, 0.5, 2),
    ("Adafactor, lr", "t5", torch.bfloat16, 2, 1, 0.5, 1),
    ("torch's Adafactor", "llama", torch.bfloat16, 4, 1, 0.0, 3),
    ("torch's Adafactor", "llama", torch.float32, 2, 1, 0.5, 0),
    ("Muon", "llama", torch.float32, 3, 2, 0.5, 3),
    ("Muon", "t5", torch.bfloat16, 2, 2, 0.0, 2),
    ("Whitened", "llama", torch.float32, 4, 1, 0.5, 3),
    pytest.param(("APOLLO", "llama", torch.float32, 2, 1, 0.5, 3), marks=APOLLO),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: ", ".join(str(each).removeprefix("torch.") for each in case)
)
def test_ranks_are_bit_for_bit(case):
    name, model, dtype, ranks, accumulation, clip, stage = case
    sections = SECTIONS[dtype] | SMALL | {"stage": stage}
    config = ds_config(clip=clip, accumulation=accumulation, **sections)
    how = {"grouping": two_groups, "make": MAKE[name]}
    assert_bits(ranks, model, batches(model, STEPS), config, look, dtype=dtype, **how)
