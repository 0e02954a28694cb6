"""What a rank sends by gloo's messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from zero.comm.communicator import Communicator


@contextmanager
def counted_messages() -> Iterator[Counter[tuple[str, int]]]:
    """Context that counts the elements of this rank's messages, by (operation, receiver)."""
    sent: Counter[tuple[str, int]] = Counter()
    exchange = Communicator._exchange

    def counting(self, name, ranks, tag, parts, received):
        sent.update({(name, ranks.ranks[at]): parts[at].numel() for at in ranks.others})
        return exchange(self, name, ranks, tag, parts, received)

    with mock.patch.object(Communicator, "_exchange", counting):
        yield sent
