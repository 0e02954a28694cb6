"""Losses at their edges, and sampled tokens. test_fused.py compares each loss with its formula."""

from __future__ import annotations

import pytest
import torch

from distill.losses import (
    LOSS_TYPES,
    Divergence,
    log_probabilities,
    sampled_bins,
    top_k_with_tail,
    value_and_gradient,
)
from tests.distill import references
from tests.tolerance import assert_close


def logits(seed: int, tokens: int, vocabulary: int, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed))


def computed(student, teacher, divergence, temperature=1.0, top_k=0):
    """The loss of each token, and its gradient on the student's logits."""
    log_q, log_p = (log_probabilities(x, temperature) for x in (student, teacher))
    said = top_k_with_tail(log_p, top_k) if top_k else log_p
    return value_and_gradient(log_q, said, divergence, temperature)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_teachers_impossible_tokens_leave_everything_finite(loss_type):
    teacher = logits(24, 4, 20)
    teacher[:, ::3] = -torch.inf
    value, gradient = computed(logits(25, 4, 20), teacher, Divergence(loss_type))
    assert value.isfinite().all() and gradient.isfinite().all()


def test_bf16_logits_are_turned_into_probabilities_in_fp32():
    student, teacher = logits(26, 10, 300).bfloat16(), logits(27, 10, 300).bfloat16()
    expected = references.divergence(student.double(), teacher.double(), "forward_kl", 1.0)
    value, _ = computed(student, teacher, Divergence("forward_kl"))
    # Two normalisations and a sum over the vocabulary; exp, log and the like add a few roundings.
    assert_close(value, expected, 3 * student.shape[-1] + 16)


def test_wrong_parameters_are_named():
    for wrong in ({"loss_type": "kl"}, {"beta": 0.0}, {"skew_alpha": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Divergence(**wrong)
    with pytest.raises(ValueError, match="top_k is 20"):
        computed(logits(0, 2, 20), logits(0, 2, 20), Divergence("jsd"), top_k=20)


# -- sampled tokens


def draws(log_p, k, n):
    """`n` estimates (n, V) of one row of log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    bins = sampled_bins(log_p.expand(n, -1), k, generator)
    return torch.zeros(n, log_p.shape[-1]).scatter_(-1, bins.indices, bins.log_p.exp())


def test_the_gradient_of_sampled_tokens_is_unbiased_and_that_of_the_most_probable_is_not():
    """A z-test for each entry of the gradient: over 20,000 draws, the mean must lie within five
    standard errors of the gradient against the whole distribution.
    """
    n, k = 20_000, 4
    torch.manual_seed(0)
    log_p, log_q = (log_probabilities(2 * torch.randn(1, 40)) for _ in range(2))
    divergence = Divergence("forward_kl")
    whole = value_and_gradient(log_q, log_p, divergence, 2.0)[1][0]

    def z(bins):
        gradients = value_and_gradient(log_q.expand(n, -1), bins, divergence, 2.0)[1].double()
        errors = gradients.std(0).div_(n**0.5).clamp_min_(1e-7)  # fp32 where nothing is random
        return ((gradients.mean(0) - whole) / errors).abs().max()

    rows = log_p.expand(n, -1)
    assert z(sampled_bins(rows, k, torch.Generator().manual_seed(1))) < 5
    assert z(top_k_with_tail(rows, k)) > 1000


def test_probable_tokens_keep_their_values_and_a_row_has_k_tokens_that_sum_to_one():
    log_p = log_probabilities(torch.tensor([[6.0, 5.0, *torch.linspace(0, 1, 60).tolist()]]))
    found = draws(log_p, 12, 500)
    assert (found > 0).sum(-1).eq(12).all()
    torch.testing.assert_close(found.sum(-1), torch.ones(500))
    torch.testing.assert_close(found[:, :2], log_p.exp()[:, :2].expand(500, -1))
    drawn = found[:, 2:]
    torch.testing.assert_close(drawn[drawn > 0], drawn.max().expand((drawn > 0).sum()))


@pytest.mark.parametrize("certain", [1, 3])
def test_a_sample_of_fewer_possible_tokens_than_k_is_the_distribution(certain):
    logits = torch.full((1, 9), -torch.inf)
    logits[:, :certain] = torch.arange(certain)
    log_p = log_probabilities(logits)
    torch.testing.assert_close(draws(log_p, 5, 3), log_p.exp().expand(3, -1))
