"""Helpers that make configurations and read their errors."""

import pytest

from zero.config import load_config


def errors(source, **options):
    """Return the lines of the error for `source`, without the name of the source."""
    with pytest.raises(ValueError) as caught:
        load_config(source, **options)
    return [line.split(": ", 1)[1] for line in str(caught.value).splitlines()]


def zero3(**keys):
    return {"zero_optimization": {"stage": 3, **keys}}


def optimizer(kind, **params):
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}
