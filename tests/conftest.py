from __future__ import annotations

import os

import pytest

# Before torch is imported. Its threads would wait for those of the other worker of pytest-xdist,
# and they wait by using a core.
os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("ZERO_TEST_THREADS", "1"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a user does first runs first, above all where a GPU is at hand."""
    items.sort(key=lambda item: item.path.name != "test_first_run.py")
