"""The record of collectives that ranks compare, and the error text about the first difference."""

from types import SimpleNamespace

import pytest

from zero.comm import fingerprint
from zero.comm.fingerprint import CollectiveOrder, explain


def recorded(*operations: tuple[str, int]) -> CollectiveOrder:
    found = CollectiveOrder()
    for kind, serial in operations:
        found.add(kind, 10, SimpleNamespace(serial=serial, name=f"blocks.{serial}"))
    return found


SAME = [("all_gather", 1), ("reduce_scatter", 1), ("all_gather", 2)]
OWN = "number 3 was all_gather of group 'blocks.3', 10 elements on the first, and "
ANOTHER_SUM = [*SAME, ("all_gather", 3), ("reduce_scatter", 2)]


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([*SAME, ("all_gather", 4)], f"{OWN}all_gather of"),
        (SAME, f"{OWN}not there on the other"),
        (ANOTHER_SUM, "number 2 was not there on the first, and reduce_scatter"),
    ],
)
def test_the_first_difference_is_named(others, text):
    own = (*SAME, ("all_gather", 3))
    ranks = [recorded(*own), recorded(*own), recorded(*others)]
    assert ranks[0].digests == ranks[1].digests != ranks[2].digests
    message = explain([each.recent for each in ranks])
    assert text in message and message.startswith("ranks 0 and 2 ")


@pytest.mark.parametrize("reduction", ["reduce_scatter", "reduce_replicas", "all_to_all"])
def test_what_communicators_do_between_each_other_does_not_matter(reduction):
    first, reduced, second = ("all_gather", 1), (reduction, 1), ("all_gather", 2)
    assert recorded(first, reduced, second).digests == recorded(reduced, first, second).digests
    assert recorded(first, reduced, second).digests != recorded(second, first, reduced).digests


def test_a_difference_that_is_too_long_ago_is_found_but_not_named(monkeypatch):
    monkeypatch.setattr(fingerprint, "KEPT", 5)
    ranks = [recorded(("all_gather", first), *[("all_gather", 7)] * 9) for first in (1, 2)]
    assert ranks[0].digests != ranks[1].digests
    assert "differ before the last 5" in explain([each.recent for each in ranks])
