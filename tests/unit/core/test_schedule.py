"""zero.core.schedule: what it prefetches, keeps and reshards.

Groups are numbers, sizes are elements.
"""

import math

from zero.core.schedule import Plan, Schedule

SIZES = (10, 20, 30, 40)
# Forward 0 1 2 3, backward 3 2 1 0.
STEP = (0, 1, 2, 3, 3, 2, 1, 0)


def schedule(prefetch=0, live=10**9, reuse=10**9, sizes=SIZES):
    return Schedule(sizes, prefetch, live, reuse)


def play(schedule, order, kind="train", wraps=False):
    """Play a pass. Return what the schedule expected next at each visit."""
    schedule.begin(kind, wraps)
    expected = []
    for group in order:
        schedule.visit(group)
        expected.append(tuple(schedule.upcoming()))
    schedule.end()
    return expected


def test_distances_are_the_elements_used_in_between():
    distances, ahead = Plan(STEP, SIZES).distances, [20 + 30 + 40 + 40 + 30 + 20, 30 + 40 + 40 + 30]
    ahead += [40 + 40, 0]
    assert distances[False] == ahead + [math.inf] * 4
    # From the last use to the first use in an equal next pass: the elements used between them.
    between = [30 + 20 + 10 + 10 + 20 + 30, 20 + 10 + 10 + 20, 10 + 10, 0]
    assert distances[True] == ahead + between


def test_the_first_pass_predicts_nothing_and_the_second_one_everything():
    made = schedule()
    assert play(made, STEP) == [()] * 8
    assert play(made, STEP) == [STEP[i + 1 :] for i in range(8)]


def test_a_pass_that_takes_another_path_stops_predicting_and_is_followed_next_time():
    made = schedule()
    play(made, STEP)
    dropped = (0, 2, 3, 3, 2, 0)
    assert play(made, dropped) == [STEP[1:], *[()] * 5]
    assert play(made, dropped) == [dropped[i + 1 :] for i in range(6)]


def test_a_pass_longer_or_shorter_than_the_recorded_one():
    made = schedule()
    play(made, (0, 1))
    assert play(made, (0, 1, 2)) == [(1,), (), ()]
    assert play(made, (0, 1)) == [(1, 2), (2,)]
    assert play(made, (0, 1)) == [(1,), ()]


def test_kinds_of_pass_do_not_disturb_each_other():
    made = schedule()
    play(made, STEP)
    play(made, (0, 1, 2, 3), kind="eval")
    assert play(made, STEP) == [STEP[i + 1 :] for i in range(8)]
    assert play(made, (0, 1, 2, 3), kind="eval")[0] == (1, 2, 3)


def test_outside_of_a_pass_nothing_is_predicted_or_recorded():
    made = schedule()
    made.visit(3)
    assert made.upcoming() == () and made.distance(3) == math.inf
    play(made, STEP)
    made.visit(2)
    assert made.upcoming() == ()


def test_keep_follows_the_reuse_distance():
    made = schedule(reuse=80)
    play(made, STEP)
    made.begin("train", wraps=False)
    kept = []
    for group in STEP:
        made.visit(group)
        kept.append(made.keep(group, live=0))
    assert kept == [False, False, True, True, False, False, False, False]


def test_keep_ends_where_too_much_is_live():
    made = schedule(live=100)
    made.begin("train", wraps=False)
    made.visit(0)
    assert not made.keep(0, live=0), "the order is not known"
    play(made, STEP)
    made.begin("train", wraps=False)
    made.visit(0)
    assert made.keep(0, live=100) and not made.keep(0, live=101)
    # This pass is abandoned, and the order stays.
    assert play(made, STEP)[0] == STEP[1:]


def test_groups_are_kept_for_the_next_pass_only_if_parameters_do_not_change_before_it():
    for wraps in (True, False):
        made = schedule(reuse=50)
        play(made, STEP)
        made.begin("train", wraps=wraps)
        for group in STEP:
            made.visit(group)
        assert made.keep(0, live=0) is wraps
        assert made.keep(1, live=0) is wraps, "20 elements away"
        assert not made.keep(2, live=0), "60 elements away"


def test_prefetch_stops_at_the_bucket_and_at_the_limit_of_live_elements():
    made = schedule(prefetch=50, live=100)
    assert made.may_prefetch(3, in_flight=49, live=60)
    assert not made.may_prefetch(3, in_flight=50, live=60)
    assert not made.may_prefetch(3, in_flight=0, live=61)
    assert not schedule(prefetch=0).may_prefetch(0, in_flight=0, live=0)
