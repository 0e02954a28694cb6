"""Reads what `pickle` and `torch.save` have written, without executing anything, and writes objects
of classes that need not be installed.

Python's own reader in Python does it, restricted: of its instructions, `_Unpickler` has those that
make numbers, strings and containers, and a class or function that a file names becomes a `Global`.
A call of one makes a `Record`, which does nothing. A tensor becomes a `Stored`: its place is
checked against the file, and its values are read when they are needed.

[Note: size] Each instruction takes a byte of the file and makes at most one object, so what is made
cannot be much larger than the file. (Python's reader in C is not used: it trusts lengths and
indices in the file.) Calls such as that of `set` copy what they are given, which may be the same
list each time, so all copies together must not have more elements than the file has bytes. Lists
that contain one list many times could still grow without bound when they are copied or written as
JSON. `_check_extent` refuses these, and also what is nested so deeply that Python's stack would
overflow."""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.serialization import StorageType

from zero.checkpoint import disk
from zero.checkpoint.files import Stored
from zero.errors import UsageError

MOST_LEVELS = 50
# How many times as many values as bytes in the file there may be, because parts are shared.
_MOST_SHARED = 10
_MOST_DIMENSIONS = 64  # torch's own limit
_LOCAL_HEADER = 30
_DTYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
# What can be wrong with the arguments of an instruction.
_WRONG = (
    ArithmeticError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError,
    pickle.UnpicklingError, struct.error,
)  # fmt: skip


class Global(NamedTuple):
    """The name of a class or function in a file."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Record:
    """An object of a class that is not created: what the file says of it.

    Attributes:
        kind: the class or function that pickle would have called.
        state: what it would have set as the object's attributes.
    """

    kind: Global
    args: tuple
    state: Any = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute, such as that of a dataclass."""
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(f"the file says nothing of {self.kind}.{name}")

    def append(self, *_: object) -> None:
        """Leave out what is put into a kind of list, set or dict."""

    extend = add = __setitem__ = append


class _Storage(NamedTuple):
    """Bytes of a file that tensors share. `dtype` is None if each tensor has its own."""

    path: Path
    position: int
    nbytes: int
    dtype: torch.dtype | None


def load(path: Path, start: int = 0, end: int | None = None) -> Any:
    """Return the content of a file of `torch.save`, or of one between two positions of a file.

    Raises UsageError, which names the file, for anything else.
    """
    try:
        with open(disk.open_regular(path.resolve()), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = size if end is None else end
            if not 0 <= start < end <= size:
                raise ValueError(f"bytes {start} to {end} of {size}")
            first = start - start % mmap.ALLOCATIONGRANULARITY
            length, access = end - first, mmap.ACCESS_READ
            with mmap.mmap(file.fileno(), length, access=access, offset=first) as content:
                return _load_archive(path, content, first)
    except (*_WRONG, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from None


def load_plain(path: Path) -> Any:
    """Return the content of a file of `pickle.dump`."""
    try:
        return _Unpickler(disk.read(path.resolve())).load()
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
        case Record() | Global() | _Storage():
            raise TypeError(f"a {value.kind if isinstance(value, Record) else value}")
        case list() | tuple():
            return type(value)(map(read_tensors, value))
        case set() | frozenset():
            return sorted(value)
    return value


# -- archives of torch.save


def _load_archive(path: Path, content: Any, first: int) -> Any:
    """Return what is in an archive at the end of `content`, the file's mapped bytes from `first`
    on.
    """
    with zipfile.ZipFile(content) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}

    def place(entry: zipfile.ZipInfo) -> int:
        """Return the position of an entry's bytes in the content."""
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError(f"{entry.filename} is compressed")
        local = entry.header_offset
        begin = content[local : local + _LOCAL_HEADER]
        if local < 0 or not begin.startswith(b"PK\3\4"):
            raise ValueError(f"{entry.filename} is not at its place")
        lengths = begin[26:28], begin[28:30]
        position = local + _LOCAL_HEADER + sum(int.from_bytes(each, "little") for each in lengths)
        if position + entry.file_size > len(content):
            raise ValueError(f"{entry.filename} is longer than the file")
        return position

    def read(name: str) -> bytes:
        position = place(entries[name])
        return content[position : position + entries[name].file_size]

    def storage(identity: object) -> _Storage:
        match identity:
            case ("storage", Global() as kind, str(key), str(), int(numel)):
                entry = entries[f"data/{key}"]
                dtype = None if kind.name == "UntypedStorage" else StorageType(kind.name).dtype
                nbytes = numel * (1 if dtype is None else dtype.itemsize)
                if nbytes != entry.file_size:
                    raise ValueError(f"{entry.filename}: {entry.file_size} bytes, not {nbytes}")
                return _Storage(path, first + place(entry), nbytes, dtype)
        raise ValueError(f"a persistent identity {type(identity).__name__}")

    if "data.pkl" not in entries:
        raise ValueError("it has no data.pkl")
    if "byteorder" in entries and read("byteorder") != b"little":
        raise ValueError("its byte order is not little-endian")
    return _Unpickler(read("data.pkl"), storage).load()


def _tensor(
    storage: _Storage,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype | None = None,
) -> Stored:
    """Return the tensor that these arguments of torch's function describe."""
    dtype = storage.dtype if dtype is None else dtype
    if not isinstance(storage, _Storage) or dtype is None or len(size) != len(stride):
        raise ValueError("a tensor without storage, dtype or strides")
    if len(size) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(size)} dimensions")
    if any(type(each) is not int or each < 0 for each in (offset, *size, *stride)):
        raise ValueError(f"a tensor of shape {size}, strides {stride}, at {offset}")
    numel, available = math.prod(size), storage.nbytes // dtype.itemsize
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if numel else 0
    if offset + span > available or numel > available:
        raise ValueError(f"a tensor of {numel} elements in a storage of {available}")
    position = storage.position + offset * dtype.itemsize
    if torch.empty_strided(size, stride, device="meta").is_contiguous():
        return Stored.at(storage.path, position, size, dtype)
    whole = Stored.at(storage.path, position, (span,), dtype)

    def read(start: int, end: int) -> torch.Tensor:
        return whole.values().as_strided(size, stride).reshape(-1)[start:end]

    return Stored(tuple(size), dtype, read)


# -- the instructions of pickle


def _set(items: Any = ()) -> set:
    return set(map(_key, items))


def _bytes(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes as {encoding}")
    return text.encode("latin1")


# The calls that are made. All others become records.
_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda pairs=(): {_key(key): value for key, value in pairs},
    "collections.defaultdict": lambda *_: {},
    "builtins.set": _set,
    "__builtin__.set": _set,
    "_codecs.encode": _bytes,
    "torch.Size": tuple,
    "torch._tensor._rebuild_from_type_v2": lambda kind, _, args, __: _call(kind, args),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": lambda *args: _tensor(*args[:4]),
    "torch._utils._rebuild_tensor_v3": lambda a, b, c, d, *rest: _tensor(a, b, c, d, rest[2]),
    "torch._utils._rebuild_parameter": lambda value, *_: value,
    "torch._utils._rebuild_parameter_with_state": lambda value, *_: value,
}
_COPIES = dict, set, tuple, bytes
_KEYS = str, int, float, bytes, type(None), torch.dtype, Global, Record


def _call(kind: object, args: object) -> object:
    if not isinstance(kind, Global) or not isinstance(args, tuple):
        raise TypeError(f"a call of a {type(kind).__name__}")
    make = _CALLS.get(str(kind))
    return Record(kind, args) if make is None else make(*args)


def _key(value: Any) -> Any:
    """Return a key of a dict, whose hash Python computes. A nested one could overflow its stack."""
    of_plain = isinstance(value, tuple) and all(isinstance(each, _KEYS) for each in value)
    if not isinstance(value, _KEYS) and not of_plain:
        raise TypeError(f"a {type(value).__name__} as a key")
    return value


# The one in C trusts lengths and indices in the file.
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]


class _Unpickler(_PythonUnpickler):
    """Reads a pickle. `persistent_load` returns what an identity of the file's own stands for."""

    def __init__(self, content: bytes, persistent_load: Callable[[object], object] | None = None):
        super().__init__(io.BytesIO(content))
        self._size = len(content)
        self._copied = 0  # elements of what calls have made; see the note on size
        if persistent_load is not None:
            self.persistent_load = persistent_load

    def load(self) -> Any:
        result = super().load()
        _check_extent(result, iter(range(_MOST_SHARED * self._size)))
        return result

    def find_class(self, module: str, name: str) -> object:
        return _DTYPES[name] if module == "torch" and name in _DTYPES else Global(module, name)

    def load_reduce(self) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        made = _call(kind, args)
        self._copied += len(made) if isinstance(made, _COPIES) else 0
        if self._copied > self._size:
            raise ValueError("its calls copy the same parts too often")
        self.append(made)

    def load_build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):  # a dict's attributes, such as _metadata, are not
            self.stack[-1].state = state

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_reduce,
        pickle.BUILD[0]: load_build,
    }


def _allow(names: str, keys: slice) -> None:
    """Have these instructions read as Python does, once it is known that what is at these places of
    the stack can be keys.
    """
    for name in names.split():
        (code,) = vars(pickle)[name]

        def read(unpickler: Any, read: Callable[[Any], None] = _PythonUnpickler.dispatch[code]):
            for key in unpickler.stack[keys]:
                _key(key)
            read(unpickler)

        _Unpickler.dispatch[code] = read


# None of them calls or imports anything, or sets attributes.
_allow(
    "PROTO FRAME STOP MARK POP POP_MARK PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET "
    "NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT EMPTY_SET GLOBAL STACK_GLOBAL BINPERSID",
    slice(0),
)
_allow("SETITEM", slice(-2, -1))
_allow("DICT SETITEMS", slice(0, None, 2))
_allow("FROZENSET ADDITEMS", slice(0, None))


def _check_extent(value: Any, left: Iterator[int], level: int = 0) -> None:
    """Raise ValueError if the value is nested too deeply or contains itself, or has more values
    than are `left` when all parts are counted as often as they occur. See the note on size.
    """
    if level > MOST_LEVELS:
        raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
    if next(left, None) is None:
        raise ValueError("its parts contain each other too often")
    for each in _inside(value):
        _check_extent(each, left, level + 1)


def _inside(value: Any) -> list[Any]:
    match value:
        case dict():
            return [*value, *value.values()]
        case list() | tuple() | set() | frozenset():
            return list(value)
        case Record():
            return [value.args, value.state]
    return []


# -- write


def save(content: Any, path: Path) -> None:
    """Write a file of `torch.save`, with each record as the object that it describes.

    Raises OSError if the disk is full.
    """
    pickler = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
    try:
        with open(path, "wb") as file:
            torch.save(content, file, pickle_module=pickler)
    except RuntimeError as error:  # torch fails again when it closes the archive
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


# The one in C looks classes up before it writes their names.
_PythonPickler: Any = vars(pickle)["_Pickler"]


class _Pickler(_PythonPickler):
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Record):
            self.write(pickle.GLOBAL + f"{obj.kind.module}\n{obj.kind.name}\n".encode())
            self.save(obj.args)
            self.write(pickle.NEWOBJ)
            self.save(obj.state)
            self.write(pickle.BUILD)
        else:
            super().save(obj, save_persistent_id)
