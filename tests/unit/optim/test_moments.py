"""8-bit codes of Adam's moments: how far they are off, and the kernel's one pass beside three
separate ones.
"""

import pytest
import torch

from tests.unit.optim.test_adam_cpu import COMPILER, gradient
from tests.unit.optim.test_adam_cpu import SETTINGS as ADAM
from zero.optim import adam8bit, adam_cpu
from zero.optim.adam8bit import BLOCK

SETTINGS = ADAM | {"weight_decay": 0.1, "decoupled_weight_decay": True}


@pytest.fixture
def path():
    """The kernel, which takes the moments' codes in its one pass."""
    if not adam_cpu.is_compiled():
        pytest.skip(f"needs {COMPILER}")


def random_moments(numel, decades=0.5, seed=0):
    """Return moments of gradients whose size varies by so many decades (standard deviation)."""
    size, *pair = torch.randn(3, numel, generator=torch.Generator().manual_seed(seed))
    exp_avg, root = (each * 10 ** (size * decades) for each in pair)
    return exp_avg, root**2


def values(*coded, numel):
    pairs = zip(adam8bit.KEYS, coded, strict=True)
    return [adam8bit.decode(key, *adam8bit.parts(each, numel)) for key, each in pairs]


def of_largest(value):
    """Return every element as a part of the largest one in its block."""
    padded = torch.nn.functional.pad(value.abs(), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
    return (padded / padded.amax(1, keepdim=True)).view(-1)[: value.numel()]


@pytest.mark.parametrize("decades", [0.1, 0.5, 1.5])
def test_the_error_is_at_most_half_a_code(decades):
    """It is so for the root of value / largest value.

    Only first moments become 0; second ones have a code >= 1.
    """
    numel = 100_003
    exp_avg, exp_avg_sq = random_moments(numel, decades)
    mean, square = values(*adam8bit.encode(exp_avg, exp_avg_sq), numel=numel)
    roots = [of_largest(each) ** (1 / 4) for each in (exp_avg, mean)]
    assert (roots[1] - roots[0]).abs().max() * 127 < 0.501
    assert torch.equal(mean.sign(), exp_avg.sign().where(roots[0] * 127 > 0.5, 0.0))
    roots = [of_largest(each) ** (1 / 8) for each in (exp_avg_sq, square)]
    assert (roots[1] - roots[0].clamp(min=1 / 255)).abs().max() * 255 < 0.501
    assert torch.equal(square > 0, exp_avg_sq > 0)


def test_the_bytes_are_those_that_are_documented():
    assert adam8bit.nbytes(1 << 20) / (1 << 20) * 2 == 2.03125
    assert [adam8bit.nbytes(numel) for numel in (1, 255, 256, 257)] == [8, 260, 260, 268]


def test_codes_of_decoded_values_are_the_same_codes():
    """So a checkpoint in fp32 holds all that the codes hold."""
    for numel in (1, 255, 256, 257, 10_000):
        coded = adam8bit.encode(*random_moments(numel, 2.0))
        for before, after in zip(coded, adam8bit.encode(*values(*coded, numel=numel)), strict=True):
            assert torch.equal(before, after)


def test_zeros_small_and_large_values():
    numel = 5 * BLOCK
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    for block, size in enumerate((0.0, 1e-40, 1e-20, 1e18, 3e38)):
        where = slice(block * BLOCK, (block + 1) * BLOCK)
        exp_avg[where], exp_avg_sq[where] = -size, size
    exp_avg_sq[BLOCK * 3 + 5] = 1e-30  # 48 decades below its neighbours
    found = values(*adam8bit.encode(exp_avg, exp_avg_sq), numel=numel)
    for value, expected in zip(found, (exp_avg, exp_avg_sq), strict=True):
        others = torch.arange(numel) != BLOCK * 3 + 5
        assert torch.allclose(value[others], expected[others], rtol=0.05, atol=0)
    # Too large, so that its updates are too small.
    assert 0 < found[1][BLOCK * 3 + 5] < 1


@pytest.mark.parametrize(
    "bad", [(float("nan"), 1.0), (1.0, float("inf")), (float("-inf"), float("inf"))]
)
def test_what_is_not_finite_becomes_0_and_changes_no_neighbour(bad):
    pair = random_moments(300)
    expected = values(*adam8bit.encode(*pair), numel=300)
    for value, each in zip(pair, bad, strict=True):
        value[[3, 299]] = each
    found = values(*adam8bit.encode(*pair), numel=300)
    for value, before in zip(found, expected, strict=True):
        assert value[3] == value[299] == 0
        largest = before[:BLOCK].abs().argmax(), BLOCK + before[BLOCK:].abs().argmax()
        assert not {3, 299} & {*map(int, largest)}
        assert torch.equal(value[[0, 100, 298]], before[[0, 100, 298]])


@pytest.mark.parametrize(
    ("numel", "dtype"),
    [
        (1, torch.bfloat16),
        (255, torch.float32),
        (257, torch.float16),
        (1000, torch.bfloat16),
        (adam_cpu.PIECE + 300, torch.float32),
    ],
)
def test_a_step_is_decoding_then_adam_then_encoding(path, numel, dtype, monkeypatch):
    monkeypatch.setattr(adam_cpu, "thread_count", lambda: 3)
    master = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    state = adam_cpu.new_state(master, coded=True)
    coded, out = [state[key] for key in adam8bit.KEYS], torch.empty(numel, dtype=torch.bfloat16)
    for number in range(1, 6):
        grad = gradient(numel, dtype, number)
        grad[number % numel] = (1.0, float("inf"), 1e-40, 1e18, float("nan"))[number - 1]
        expected, wide = master.clone(), values(*coded, numel=numel)
        adam_cpu.adam(expected, grad, *wide, None, SETTINGS, number, 0.5)
        adam_cpu.adam(master, grad, *coded, out, SETTINGS, number, 0.5)
        assert torch.equal(master.nan_to_num(), expected.nan_to_num())
        assert torch.equal(out.nan_to_num(), expected.bfloat16().nan_to_num())
        for found, made, kind in zip(
            coded, adam8bit.encode(*wide, step=number), (torch.int8, torch.uint8), strict=True
        ):
            (codes, scales), (others, other_scales) = (
                adam8bit.parts(each, numel) for each in (found, made)
            )
            assert torch.equal(scales, other_scales)
            apart = (codes.view(kind).int() - others.view(kind).int()).abs()
            # torch's square root differs in the last bit, which counts in the middle between two
            # codes.
            assert apart.max() <= 1 and apart.sum() <= 1 + numel / 1000
        master.nan_to_num_()


@pytest.mark.parametrize(("early", "late"), [(100.0, 1.0), (1.0, 3.0)], ids=["falls", "rises"])
def test_second_moments_follow_slow_changes(path, early, late):
    """Rounded to the nearest code they would not: a step changes them by less than half of the way
    to the next code.
    """
    generator, settings = (
        torch.Generator().manual_seed(0),
        SETTINGS | {"betas": (0.9, 0.99), "lr": 0.0},
    )
    master, exact = torch.zeros(BLOCK), torch.zeros(BLOCK)
    state = adam_cpu.new_state(master, coded=True)
    coded = [state[key] for key in adam8bit.KEYS]
    for step in range(1, 1201):
        grad = torch.randn(BLOCK, generator=generator) * (early if step <= 100 else late)
        grad[0] = 1e3
        adam_cpu.adam(master, grad, *coded, None, settings, step, 1.0)
        exact = 0.99 * exact + 0.01 * grad**2
    ratio = values(*coded, numel=BLOCK)[1] / exact
    assert abs(ratio.log().mean()) < 0.1 and ratio.log().std() < 0.5


def test_weights_without_gradients_come_to_rest(path):
    """A first moment that stood still while the second one decays would move them ever faster."""
    generator = torch.Generator().manual_seed(0)
    settings = SETTINGS | {"betas": (0.9, 0.99), "lr": 1e-3, "weight_decay": 0.0}
    states = (adam_cpu.new_state(torch.zeros(BLOCK), coded=coded) for coded in (True, False))
    pairs = [(torch.zeros(BLOCK), state) for state in states]
    for step in range(1, 2001):
        grad = torch.randn(BLOCK, generator=generator)
        grad[64:] *= step <= 100
        for master, state in pairs:
            moments_of = (state[key] for key in adam8bit.KEYS)
            adam_cpu.adam(master, grad, *moments_of, None, settings, step, 1.0)
    idle, expected = (master[64:].abs().max().item() for master, _ in pairs)
    assert idle == pytest.approx(expected, rel=0.2)
