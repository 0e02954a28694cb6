"""Reads what `pickle` and `torch.save` have written, without executing anything, and writes objects
of classes that need not be installed.

torch reads the archive, and Python's own reader in Python the pickle in it. It gets the classes and
functions that torch allows with `weights_only=True`, which make tensors and containers, and for any
other name a class of its own, of which an object is a `Record`, which does nothing. A tensor
becomes a `Stored`: torch finds its place in the mapped file, from which its values are read when
they are needed."""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch._weights_only_unpickler import _get_allowed_globals
from torch.serialization import _load, _open_zipfile_reader
from torch.utils._pytree import tree_map_only

from zero.checkpoint import disk
from zero.checkpoint.stored import Stored
from zero.errors import UsageError

# What can be wrong with an archive, or with the arguments of an instruction.
_WRONG = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError,
    RuntimeError, TypeError, ValueError, pickle.UnpicklingError, struct.error,
)  # fmt: skip


class Record:
    """An object of a class that is not created: what the file says of it.

    Attributes:
        kind: the class or function that pickle would have called, with its module.
        args: what it would have got.
        state: what it would have set as the object's attributes, which the record has too.
    """

    kind: ClassVar[str]
    args: tuple
    state: Any = None

    def __new__(cls, *args: Any) -> Any:
        record = super().__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            vars(self).update(state)

    def append(self, *_: object) -> None:
        """Leave out what is put into a kind of list, set or dict."""

    extend = add = __setitem__ = append


def kind_of(name: str) -> type[Record]:
    """The class of records of this class or function, given with its module."""
    return type(name.rpartition(".")[2], (Record,), {"kind": name})


def load(path: Path, start: int = 0, end: int | None = None) -> Any:
    """Return the content of a file of `torch.save`, or of one between two positions of a file.

    Raises UsageError, which names the file, for anything else.
    """
    from torch.distributed.checkpoint.utils import _create_file_view  # here: it takes long

    try:
        with open(disk.open_regular(path.resolve()), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = size if end is None else end
            if not 0 <= start < end <= size:
                raise ValueError(f"bytes {start} to {end} of {size}")
            whole: Any = torch.UntypedStorage.from_file(str(path.resolve()), False, size)
            mapped, view = whole[start:end], _create_file_view(file, start, end - start)
            with cast(Any, _open_zipfile_reader)(view) as archive:
                if archive.has_record("byteorder") and archive.get_record("byteorder") != b"little":
                    raise ValueError("its byte order is not little-endian")
                content = _load(archive, "cpu", _MODULE, overall_storage=mapped)

        def stored(tensor: torch.Tensor) -> Stored:
            shape, first = tuple(tensor.shape), tensor.data_ptr() - mapped.data_ptr()
            if math.prod(shape) * tensor.itemsize > tensor.untyped_storage().nbytes():
                raise ValueError(f"a tensor of shape {list(shape)} that is larger than its storage")
            if tensor.is_contiguous() and 0 <= first < mapped.nbytes():
                return Stored.at(path, start + first, shape, tensor.dtype)
            return Stored.of(tensor)

        return tree_map_only(torch.Tensor, stored, content)
    except _WRONG as error:
        raise _unreadable(path, error) from None


def load_plain(path: Path) -> Any:
    """Return the content of a file of `pickle.dump`."""
    try:
        return _Unpickler(io.BytesIO(disk.read(path.resolve()))).load()
    except _WRONG as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, why: Exception) -> UsageError:
    text = str(why) if type(why) is ValueError else f"{type(why).__name__}: {why}"
    line = " ".join(text.split())[:200]  # it may quote the file
    return UsageError(f"{path} is damaged, or no file of this format: {line}")


def without_records(
    values: dict[str, Any], missing: list[str] | None = None, words: str = "{}"
) -> dict[str, Any]:
    """Return the values without those that have a record or a tensor's place in them, whose names
    are added to what is `missing`, in these words. Small tensors are read.
    """
    kept = {}
    for name, value in values.items():
        try:
            kept[name] = read_tensors(value)
        except TypeError:
            if missing is not None:
                missing.append(words.format(str(name)))
    return kept


def read_tensors(value: Any) -> Any:
    """Return the value with its tensors in memory. Raises TypeError if it contains a record."""
    match value:
        case Stored():
            return value.tensor()
        case dict():
            return {key: read_tensors(item) for key, item in value.items()}
        case Record() | type():
            raise TypeError(f"a {value.kind if isinstance(value, Record) else value}")
        case list() | tuple():
            return type(value)(map(read_tensors, value))
        case set() | frozenset():
            return sorted(value)
    return value


# The one in C looks classes up before it writes their names, and sets attributes of anything.
_PythonPickler: Any = vars(pickle)["_Pickler"]
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]


class _Unpickler(_PythonUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        path = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if path == "collections.defaultdict":
            return lambda *_: {}
        return _get_allowed_globals().get(path) or kind_of(path)

    def load_build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):  # a dict's attributes, such as _metadata, are not
            self.stack[-1].__setstate__(state)

    dispatch: ClassVar[dict[int, Any]] = _PythonUnpickler.dispatch | {pickle.BUILD[0]: load_build}


class _Pickler(_PythonPickler):
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Record):
            module, _, name = obj.kind.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
            self.save(obj.args)
            self.write(pickle.NEWOBJ)
            self.save(obj.state)
            self.write(pickle.BUILD)
        else:
            super().save(obj, save_persistent_id)


_MODULE = SimpleNamespace(__name__="pickle", Pickler=_Pickler, Unpickler=_Unpickler)


def save(content: Any, path: Path) -> None:
    """Write a file of `torch.save`, with each record as the object that it describes.

    Raises OSError if the disk is full.
    """
    try:
        with open(path, "wb") as file:
            torch.save(content, file, pickle_module=_MODULE)
    except RuntimeError as error:  # torch fails again when it closes the archive
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
