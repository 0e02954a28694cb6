"""Helpers that make configurations and read their errors."""

from collections.abc import Iterator

import pytest

from zero.config import Config, load_config
from zero.config.keys import Section
from zero.config.load import section_of


def errors(source, **options):
    """Return the lines of the error for `source`, without the name of the source."""
    with pytest.raises(ValueError) as caught:
        load_config(source, **options)
    return [line.split(": ", 1)[1] for line in str(caught.value).splitlines()]


def all_keys(section: type[Section] = Config) -> Iterator[tuple[type[Section], str]]:
    """Each key with its section."""
    for key in section.model_fields:
        yield section, key
        if (inner := section_of(section, key)) is not None:
            yield from all_keys(inner)


def zero3(**keys):
    return {"zero_optimization": {"stage": 3, **keys}}


def optimizer(kind, **params):
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}
