"""The fused head against float64 autograd of the plain formulas.

Also: settings that must not change its result.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from distill.fused import (
    HeadTeacher,
    Recipe,
    SharedTokens,
    StoredTeacher,
    Targets,
    fused_head_loss,
    logits_loss,
)
from distill.losses import LOSS_TYPES, Divergence, log_probabilities, top_k_with_tail
from tests.dist.parallel.test_sequence import Largest
from tests.distill import references
from tests.tolerance import assert_close, rounding

TOKENS, WIDTH, TEACHER_WIDTH, VOCABULARY = 23, 8, 12, 61
# Additions from input to result: two heads, two normalisations, the sums over vocabulary and
# tokens. exp, log and the like add a few roundings.
TERMS = WIDTH + TEACHER_WIDTH + 3 * VOCABULARY + TOKENS + 16
close = partial(
    torch.testing.assert_close,
    rtol=rounding(torch.float32, TERMS),
    atol=rounding(torch.float32, TERMS),
)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(dtype=torch.float32, bias=True, teacher_vocabulary=VOCABULARY):
    """Return the student's (hidden, weight, bias), which need gradients, the labels, and the
    teacher's three.
    """
    student = [
        normal(1, TOKENS, WIDTH),
        normal(2, VOCABULARY, WIDTH),
        normal(3, VOCABULARY) if bias else None,
    ]
    teacher = [
        normal(4, TOKENS, TEACHER_WIDTH) / 2,
        normal(5, teacher_vocabulary, TEACHER_WIDTH),
        None,
    ]
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(6))
    student = [None if x is None else x.to(dtype).requires_grad_() for x in student]
    return student, labels, [None if x is None else x.to(dtype) for x in teacher]


def fused(student, labels, teacher, recipe, scale=1.0):
    targets = Targets(labels, HeadTeacher(*teacher, labels.device))
    total, losses = fused_head_loss(*student, targets, recipe)
    (total * scale).backward()
    return total.detach(), [x.grad for x in student if x is not None], losses


def plain(student, labels, teacher, recipe, scale=1.0):
    student = [None if x is None else x.detach().double().requires_grad_() for x in student]
    z = torch.nn.functional.linear(*student)
    zt = torch.nn.functional.linear(*(None if x is None else x.double() for x in teacher))
    ours, theirs = recipe.shared or (slice(None), slice(None))
    divergence = recipe.divergence
    kd = references.divergence(
        z[:, ours], zt[:, theirs], divergence.loss_type, recipe.temperature, divergence.beta,
        divergence.skew_alpha, recipe.top_k,
    )  # fmt: skip
    ce = cross_entropy(z, labels, reduction="sum")
    total = (1 - recipe.kd_alpha) * ce + recipe.kd_alpha * kd.sum()
    (total * scale).backward()
    return total.detach(), [x.grad for x in student if x is not None]


def assert_same(ours, expected):
    assert_close(ours[0], expected[0], TERMS)
    for gradient, reference in zip(ours[1], expected[1], strict=True):
        assert_close(gradient, reference, TERMS)


def some(seed: int, size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:40]


RECIPES = [
    *(
        Recipe(0.7, Divergence(kind), temperature, top_k, chunk_size=5)
        for kind in LOSS_TYPES
        for temperature, top_k in ((1.0, 0), (2.0, 0), (2.0, 7))
        if not (top_k and kind == "uld")  # sorted probabilities have no bins
    ),
    *(Recipe(1.0, Divergence(kind), 2.0, k) for kind in LOSS_TYPES[:-1] for k in (1, 60)),
    *(Recipe(1.0, Divergence("jsd", beta=beta), 1.5) for beta in (0.01, 0.3, 0.99)),
    *(
        Recipe(1.0, Divergence(kind, skew_alpha=alpha), temperature)
        for kind in ("skew_forward_kl", "skew_reverse_kl")
        for alpha, temperature in ((0.0, 0.5), (0.3, 1.5), (0.9, 4.0))
    ),
    *(Recipe(0.5, Divergence("jsd"), 2.0, chunk_size=size) for size in (1, 7, 22, 23, 1000, 0)),
    Recipe(1.0, Divergence("forward_kl"), 2.0, chunk_size=5),
    # The heads have 61 and 70 rows, and 55 are tokens of both, or 40 that have other ids. The
    # divergence is over these, cross-entropy over all 61.
    Recipe(0.6, temperature=2.0, shared=SharedTokens(slice(0, 55), slice(0, 55)), chunk_size=6),
    Recipe(0.6, Divergence("reverse_kl"), shared=SharedTokens(some(1, 61), some(2, 70))),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_value_and_gradients_are_those_of_the_formulas(recipe):
    is_larger = recipe.shared is not None or recipe.divergence.loss_type == "uld"
    rows = 70 if is_larger else VOCABULARY
    inputs = case(bias=recipe.temperature > 1, teacher_vocabulary=rows)
    assert_same(fused(*inputs, recipe, scale=0.3), plain(*inputs, recipe, scale=0.3))


def test_logits_give_the_same_as_the_fused_head():
    recipe = Recipe(0.7, Divergence("skew_reverse_kl"), 1.5, chunk_size=5, with_agreement=True)
    student, labels, teacher = case()
    total, gradients, losses = fused(student, labels, teacher, recipe)
    others = [x.detach().requires_grad_() for x in student]
    targets = Targets(labels, HeadTeacher(*teacher, labels.device))
    from_logits, from_logits_losses = logits_loss(
        torch.nn.functional.linear(*others), targets, recipe
    )
    from_logits.backward()
    assert_same((from_logits.detach(), [x.grad for x in others]), (total, gradients))
    close(from_logits_losses, losses)


def test_statistics_of_each_token():
    recipe = Recipe(0.7, temperature=2.0, chunk_size=5, with_agreement=True)
    student, labels, teacher = case()
    _, _, losses = fused(student, labels, teacher, recipe)
    z, zt = torch.nn.functional.linear(*student).detach(), torch.nn.functional.linear(*teacher)
    assert_close(losses.ce, cross_entropy(z, labels, reduction="none"), TERMS)
    assert_close(losses.teacher_ce, cross_entropy(zt, labels, reduction="none"), TERMS)
    assert_close(
        losses.kd, references.divergence(z.double(), zt.double(), "forward_kl", 2.0), TERMS
    )
    assert losses.agreement.tolist() == (z.argmax(-1) == zt.argmax(-1)).float().tolist()


def test_stored_bins_give_the_same_as_the_live_teacher():
    recipe = Recipe(0.8, Divergence("jsd"), 2.0, top_k=9, chunk_size=5)
    student, labels, teacher = case()
    expected = fused(student, labels, teacher, recipe)[:2]
    bins = top_k_with_tail(log_probabilities(torch.nn.functional.linear(*teacher), 2.0), 9)
    student = case()[0]
    targets = Targets(labels, StoredTeacher(bins.indices.int(), bins.log_p, torch.zeros(TOKENS)))
    total, _ = fused_head_loss(*student, targets, replace(recipe, top_k=0))
    total.backward(retain_graph=True)
    assert_same((total.detach(), [x.grad for x in student]), expected)
    with pytest.raises(RuntimeError, match="one backward only"):
        total.backward()


def test_tokens_of_which_the_teacher_says_nothing_have_cross_entropy_alone():
    student, labels, teacher = case()
    said = torch.arange(TOKENS) % 3 > 0
    recipe = Recipe(0.8, chunk_size=5)
    targets = Targets(labels, HeadTeacher(*teacher, labels.device), said)
    total, losses = fused_head_loss(*student, targets, recipe)
    total.backward()
    weights = torch.where(said, 0.2, 1.0)
    assert losses.kd[~said].abs().max() == 0 and losses.kd[said].min() > 0
    assert_close(total, (weights * losses.ce + 0.8 * losses.kd).sum(), TERMS)
    z = torch.nn.functional.linear(*(x.detach() for x in student))
    q, p = z.softmax(-1), torch.nn.functional.linear(*teacher).softmax(-1)
    y = torch.nn.functional.one_hot(labels, VOCABULARY)
    dz = weights[:, None] * (q - y) + torch.where(said, 0.8, 0.0)[:, None] * (q - p)
    assert_close(student[2].grad, dz.sum(0), TERMS)


def test_no_tokens_give_no_loss_and_zero_gradients():
    student, labels, teacher = case()
    none = [student[0].detach()[:0].requires_grad_(), *student[1:]]
    total, gradients, losses = fused(none, labels[:0], [teacher[0][:0], *teacher[1:]], Recipe())
    assert total == 0 and losses.ce.shape == (0,)
    assert all(gradient.abs().sum() == 0 for gradient in gradients)


def test_bf16_heads_sum_the_weights_gradient_in_fp32():
    recipe = Recipe(0.5, chunk_size=1)  # 23 sums: in bf16 they would lose most of their digits
    student, labels, teacher = case(torch.bfloat16, bias=False)
    ours, expected = (
        fused(student, labels, teacher, recipe),
        plain(student, labels, teacher, recipe),
    )
    assert ours[1][1].dtype == torch.bfloat16
    scale = expected[1][1].abs().max()
    # A weight's gradient is rounded to bf16 once, at the end. Its inputs are rounded several times.
    assert (ours[1][1].double() - expected[1][1]).abs().max() <= rounding(torch.bfloat16, 4) * scale


def test_memory_holds_no_tensor_of_tokens_times_vocabulary():
    inputs = case()
    with Largest() as largest:
        fused(*inputs, Recipe(0.5, Divergence("jsd"), 2.0, chunk_size=3))
    assert largest.elements <= max(3 * VOCABULARY, VOCABULARY * TEACHER_WIDTH) < TOKENS * VOCABULARY
