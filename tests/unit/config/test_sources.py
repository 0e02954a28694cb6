"""Defaults that are read in sources are those that the imported classes have."""

import dataclasses
import inspect
import re

import pytest
import torch
from transformers import TrainingArguments

from zero.config.load import section_of
from zero.config.optim import ELEMENTWISE
from zero.config.settings import Config
from zero.config.sources import defaults


@pytest.mark.parametrize("kind", [kind for kind in ELEMENTWISE if kind != "Lion"])
def test_an_optimizer_of_torch(kind: str):
    parameters = inspect.signature(getattr(torch.optim, kind)).parameters
    expected = {name: each.default for name, each in parameters.items() if name != "params"}
    assert defaults(f"torch.optim.{kind.lower()}", kind) == expected


def test_the_arguments_of_the_trainer_that_keys_name():
    fields = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    found = defaults("transformers.training_args", "TrainingArguments")
    named, sections = set(), [Config]
    for section in sections:
        for key in section.model_fields:
            if inner := section_of(section, key):
                sections.append(inner)
            named |= {*re.findall(r"\w+", section.about(key).get("auto", ""))} & fields.keys()
    assert len(named) > 8
    assert {name: found[name] for name in named} == {name: fields[name] for name in named}
