"""Defaults that are read in sources are those that the imported classes have."""

import dataclasses
import inspect
import re

import pytest
import torch
from transformers import TrainingArguments

from tests.unit.configurations import all_keys
from zero.config.optim import ELEMENTWISE
from zero.config.sources import defaults


@pytest.mark.parametrize("kind", [kind for kind in ELEMENTWISE if kind != "Lion"])
def test_an_optimizer_of_torch(kind: str):
    parameters = inspect.signature(getattr(torch.optim, kind)).parameters
    expected = {name: each.default for name, each in parameters.items() if name != "params"}
    assert defaults(f"torch.optim.{kind.lower()}", kind) == expected


def test_the_arguments_of_the_trainer_that_keys_name():
    fields = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    found = defaults("transformers.training_args", "TrainingArguments")
    named = set()
    for section, key in all_keys():
        named |= {*re.findall(r"\w+", section.about(key).get("auto", ""))} & fields.keys()
    assert len(named) > 8
    assert {name: found[name] for name in named} == {name: fields[name] for name in named}
