"""Values stored in JSON come back unchanged, including their types."""

import json
import math
import random
from enum import Enum

import numpy
import pytest
import torch

from zero.checkpoint.values import decode, describe, encode, rebuild


def round_trip(value: object) -> object:
    return decode(json.loads(json.dumps(encode(value, "value"))))


PLAIN = [
    *(None, True, -3, 2**70, 0.1, 1e-320, math.inf, "ä", b"\x00\xff", [1, [2.5]], (1, (2,))),
    *({"a": (1,)}, {3: "int", (1, 2): "tuple", None: 0}, {"$type": "tuple"}),
    random.Random(0).getstate(),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: str(value)[:20])
def test_plain_values(value):
    found = round_trip(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]
)
def test_tensors_bit_for_bit(dtype):
    value = torch.tensor([[0.1, -2.0, 3.0], [0.0, 1.0, 1e-3]]).to(dtype)
    for each in (value.T, value[:0], value[0, 0]):
        found = round_trip({"tensor": each})["tensor"]
        assert found.dtype == dtype and torch.equal(found, each)


def test_arrays_and_numpy_numbers():
    array = numpy.arange(6, dtype=numpy.uint16).reshape(2, 3)
    found = round_trip(array)
    assert found.dtype == array.dtype and numpy.array_equal(found, array)
    found[0, 0] = 9  # it is writable, like the original
    assert round_trip(numpy.float32(0.1)) == float(numpy.float32(0.1))
    assert round_trip(numpy.float64(0.1)) == 0.1


class Kind(str, Enum):
    COSINE = "cosine"


def test_subclasses_become_plain_values():
    assert json.dumps(encode(Kind.COSINE, "kind")) == '"cosine"'


@pytest.mark.parametrize(
    "value, place",
    [
        ({"a": [1, {2}]}, r"state\.a\[1\]: a set"),
        (numpy.array([print]), "state: a ndarray"),
        (print, "state: a builtin"),
    ],
)
def test_what_cannot_be_stored_is_named(value, place):
    with pytest.raises(ValueError, match=place):
        encode(value, "state")


@pytest.mark.parametrize(
    "value",
    [
        {"$type": "tensor", "dtype": "float32", "shape": [10**9], "data": "AAAA"},
        {"$type": "tensor", "dtype": "nn", "shape": [1], "data": ""},
        {"$type": "array", "dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="},
        {"$type": "dict", "items": [[[], 1]]},
        {"$type": "tuple"},
        {"$type": "bytes", "data": 3},
        {"$type": "code"},
        {"$type": []},
    ],
    ids=str,
)
def test_what_encode_never_made_is_refused(value):
    with pytest.raises(ValueError):
        decode({"a": [value]})


class Basis:
    def __init__(self) -> None:
        raise AssertionError("no code of a class runs when an object is read")


class Closing:
    def __del__(self) -> None:
        self.ran.append(self)


def test_objects_of_the_optimizers_package_come_back_by_their_attributes():
    basis = object.__new__(Basis)
    basis.rank, basis.matrices = 2, [torch.ones(2, 3), None]
    tensors: list[torch.Tensor] = []
    description = describe(basis, tensors, "state", package="tests")
    found = rebuild(description, lambda number, shape: tensors[number].view(shape), "tests")
    assert type(found) is Basis and found.rank == 2 and found.matrices[1] is None
    assert torch.equal(found.matrices[0], torch.ones(2, 3))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("pathlib", "Path"), ("tests.not_imported", "Basis")),
        *((__name__, name) for name in ("Closing", "decode", "Missing")),
    ],
)
def test_a_forged_description_makes_no_object_of_another_class(module, name):
    description = {"object": [module, name, {"dict": []}]}
    with pytest.raises(ValueError, match=f"an object of {module}.{name}"):
        rebuild(description, lambda number, shape: torch.empty(shape), "tests")
