from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a user does first runs first, above all where a GPU is at hand."""
    items.sort(key=lambda item: item.path.name != "test_first_run.py")
