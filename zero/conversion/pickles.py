"""Reads what `pickle` and `torch.save` have written, without executing anything, and writes objects
of classes that need not be installed.

pickle's own reader imports modules and calls what a file names, and it trusts lengths and indices
in the file, so that a few changed bytes run a command or take all memory. The interpreter below
knows the instructions, builds only numbers, strings, lists, tuples, sets and dicts, and turns
everything else into a `Record`, which does nothing. A tensor becomes a `Stored`: its place is
checked against the file, and its values are read when they are needed.

[Note: size] Each instruction takes a byte of the file and makes at most one object, so what is made
cannot be much larger than the file. Calls such as that of `set` copy what they are given, which may
be the same list each time, so all copies together must not have more elements than the file has
bytes. Lists that contain one list many times could still grow without bound when they are copied or
written as JSON. `_check_extent` refuses these, and also what is nested so deeply that Python's
stack would overflow."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from zero.checkpoint import disk
from zero.checkpoint.files import bytes_of
from zero.conversion.training_state import Stored
from zero.errors import UsageError

MOST_LEVELS = 50
# How many times as many values as instructions there may be, because parts are shared.
_MOST_SHARED = 20
_MOST_DIMENSIONS = 64  # torch's own limit
_LOCAL_HEADER = 30
_DTYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# What can be wrong with the arguments of an instruction.
_WRONG = ArithmeticError, AttributeError, LookupError, TypeError, ValueError


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
        items: what it would have put into the object, if that is a kind of list or dict.
    """

    kind: Global
    args: tuple
    state: Any = None
    items: list = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute, such as that of a dataclass."""
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(f"the file says nothing of {self.kind}.{name}")


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
            if not 0 <= start <= end <= size:
                raise ValueError(f"bytes {start} to {end} of {size}")
            window = _Window(file, start, end)
            with zipfile.ZipFile(io.BufferedReader(window)) as archive:
                return _load_archive(_Archive(path, file, archive, start, end))
    except (*_WRONG, zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError) as error:
        raise _unreadable(path, error) from None


def load_plain(path: Path) -> Any:
    """Return the content of a file of `pickle.dump`."""
    try:
        return interpret(disk.read(path.resolve()))
    except _WRONG as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, why: Exception) -> UsageError:
    text = str(why) if type(why) is ValueError else f"{type(why).__name__}: {why}"
    line = " ".join(text.split())[:200]  # it may quote the file
    return UsageError(f"{path} is damaged, or no file of this format: {line}")


def without_records(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values without those that have a record or a tensor's place in them, and the names
    of these. Small tensors are read.
    """
    kept, left_out = {}, []
    for name, value in values.items():
        try:
            kept[name] = read_tensors(value)
        except TypeError:
            left_out.append(str(name))
    return kept, left_out


def read_tensors(value: Any) -> Any:
    """Return the value with its tensors in memory. Raises TypeError if it contains a record."""
    match value:
        case Stored():
            return value.tensor()
        case dict():
            return {key: read_tensors(item) for key, item in value.items()}
        case list():
            return [read_tensors(item) for item in value]
        case tuple() if not isinstance(value, Global):
            return tuple(read_tensors(item) for item in value)
        case set():
            return sorted(value)
        case Record() | Global() | _Storage():
            raise TypeError(f"a {value.kind if isinstance(value, Record) else value}")
    return value


# -- archives of torch.save


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: io.BufferedReader, start: int, end: int):
        self._descriptor, self._start, self._size = file.fileno(), start, end - start
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} of a file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._position))
        data = os.pread(self._descriptor, count, self._start + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _Archive(NamedTuple):
    path: Path
    file: io.BufferedReader
    archive: zipfile.ZipFile
    start: int
    end: int

    def place(self, entry: zipfile.ZipInfo) -> int:
        """Return the position of an entry's bytes in the file."""
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise ValueError(f"{entry.filename} is compressed")
        local = self.start + entry.header_offset
        within = self.start <= local <= self.end - _LOCAL_HEADER
        begin = os.pread(self.file.fileno(), _LOCAL_HEADER, local) if within else b""
        if not begin.startswith(b"PK\3\4"):
            raise ValueError(f"{entry.filename} is not at its place")
        lengths = begin[26:28], begin[28:30]
        position = local + _LOCAL_HEADER + sum(int.from_bytes(each, "little") for each in lengths)
        if position + entry.file_size > self.end:
            raise ValueError(f"{entry.filename} is longer than the file")
        return position

    def read(self, entry: zipfile.ZipInfo) -> bytes:
        return os.pread(self.file.fileno(), entry.file_size, self.place(entry))


def _load_archive(found: _Archive) -> Any:
    entries = {entry.filename.partition("/")[2]: entry for entry in found.archive.infolist()}
    if "data.pkl" not in entries:
        raise ValueError("it has no data.pkl")
    if "byteorder" in entries and found.read(entries["byteorder"]) != b"little":
        raise ValueError("its byte order is not little-endian")

    def storage(identity: object) -> _Storage:
        match identity:
            case ("storage", Global() as kind, str(key), str(), int(numel)):
                entry = entries[f"data/{key}"]
                dtype = None if kind.name == "UntypedStorage" else _STORAGES[kind.name]
                nbytes = numel * (1 if dtype is None else dtype.itemsize)
                if nbytes != entry.file_size:
                    raise ValueError(f"{entry.filename}: {entry.file_size} bytes, not {nbytes}")
                return _Storage(found.path, found.place(entry), nbytes, dtype)
        raise ValueError(f"a persistent identity {type(identity).__name__}")

    return interpret(found.read(entries["data.pkl"]), storage)


def read_at(path: Path, position: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return `numel` elements of a file."""
    values = torch.empty(numel, dtype=dtype, device="cpu")
    left = bytes_of(values)
    descriptor = disk.open_regular(path.resolve())
    try:
        while left:
            count = os.preadv(descriptor, [left], position)
            if not count:
                raise UsageError(f"{path} became shorter while it was read")
            left, position = left[count:], position + count
    finally:
        os.close(descriptor)
    return values


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
    numel, available = 1, storage.nbytes // dtype.itemsize
    for each in size:
        numel *= each
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if numel else 0
    if offset + span > available or numel > available:
        raise ValueError(f"a tensor of {numel} elements in a storage of {available}")
    place, expected, contiguous = storage.position + offset * dtype.itemsize, 1, True
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        contiguous &= n == 1 or step == expected
        expected *= n

    def read(start: int, end: int) -> torch.Tensor:
        if contiguous or not numel:
            return read_at(storage.path, place + start * dtype.itemsize, dtype, end - start)
        whole = read_at(storage.path, place, dtype, span)
        return whole.as_strided(size, stride).reshape(-1)[start:end]

    return Stored(tuple(size), dtype, read)


# -- the instructions of pickle


def _first_argument(value: object, *_: object) -> object:
    return value


def _pairs(pairs: Any = ()) -> dict:
    return {_key(key): value for key, value in pairs}


def _bytes(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes as {encoding}")
    return text.encode("latin1")


# What is built. All else becomes a record.
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _pairs,
    ("collections", "defaultdict"): lambda *_: {},
    ("builtins", "set"): lambda items=(): {_key(item) for item in items},
    ("__builtin__", "set"): lambda items=(): {_key(item) for item in items},
    ("_codecs", "encode"): _bytes,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): lambda *args: _tensor(*args[:4]),
    ("torch._utils", "_rebuild_tensor_v3"): lambda *args: _tensor(
        args[0], args[1], args[2], args[3], args[6]
    ),
    ("torch._utils", "_rebuild_parameter"): _first_argument,
    ("torch._utils", "_rebuild_parameter_with_state"): _first_argument,
}
_COPIES = dict, set, tuple, bytes
_CONSTANTS = set(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING "
    "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8"
    "".split()
)
_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_KEYS = str, int, float, bytes, type(None), torch.dtype, Global, Record


def _key(value: Any) -> Any:
    """Return a key of a dict, whose hash Python computes. A nested one could overflow its stack."""
    of_plain = isinstance(value, tuple) and all(isinstance(each, _KEYS) for each in value)
    if not isinstance(value, _KEYS) and not of_plain:
        raise TypeError(f"a {type(value).__name__} as a key")
    return value


def _global(module: object, name: object) -> object:
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a class without a name")
    return _DTYPES[name] if module == "torch" and name in _DTYPES else Global(module, name)


def _call(kind: object, args: object) -> object:
    if not isinstance(kind, Global) or not isinstance(args, tuple):
        raise TypeError(f"a call of a {type(kind).__name__}")
    if kind == ("torch._tensor", "_rebuild_from_type_v2"):
        return _call(args[0], args[2])
    act = _CALLS.get(kind)
    return Record(kind, args) if act is None else act(*args)


def _put_items(target: object, items: list) -> None:
    pairs = zip(items[::2], items[1::2], strict=True)
    match target:
        case dict():
            target.update((_key(key), value) for key, value in pairs)
        case Record():
            target.items += pairs
        case _:
            raise TypeError(f"items of a {type(target).__name__}")


def _append(target: object, items: list) -> None:
    match target:
        case list():
            target += items
        case set():
            target.update(map(_key, items))
        case Record():
            target.items += items
        case _:
            raise TypeError(f"elements of a {type(target).__name__}")


def interpret(content: bytes, persistent: Callable[[object], object] | None = None) -> Any:
    """Return what a pickle describes. `persistent` returns what an identity of the file's own
    stands for.

    Raises ValueError, TypeError or LookupError for what is no pickle or is not understood.
    """
    stack: list[Any] = []
    marked: list[list[Any]] = []
    memo: dict[int, Any] = {}
    copies = 0  # elements of what calls have made; see the note on size
    instructions: Any = pickletools.genops(content)

    def since_mark() -> list[Any]:
        nonlocal stack
        items, stack = stack, marked.pop()
        return items

    for count, (opcode, argument, _) in enumerate(instructions, 1):
        match opcode.name:
            case name if name in _CONSTANTS:
                stack.append(argument)
            case name if name in _NEW:
                stack.append(_NEW[name]())
            case "PROTO" | "FRAME":
                pass
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                marked.append(stack)
                stack = []
            case "TUPLE":
                items = since_mark()
                stack.append(tuple(items))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                length = int(opcode.name[-1])
                items = [stack.pop() for _ in range(length)]
                stack.append(tuple(reversed(items)))
            case "LIST":
                items = since_mark()
                stack.append(items)
            case "DICT":
                items, new = since_mark(), {}
                _put_items(new, items)
                stack.append(new)
            case "FROZENSET":
                items = since_mark()
                stack.append(set(map(_key, items)))
            case "APPEND":
                items = [stack.pop()]
                _append(stack[-1], items)
            case "APPENDS" | "ADDITEMS":
                items = since_mark()
                _append(stack[-1], items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _put_items(stack[-1], [key, value])
            case "SETITEMS":
                items = since_mark()
                _put_items(stack[-1], items)
            case "POP":
                stack.pop()
            case "POP_MARK":
                since_mark()
            case "GLOBAL":
                stack.append(_global(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_global(module, name))
            case "REDUCE" | "NEWOBJ":
                args, kind = stack.pop(), stack.pop()
                made = _call(kind, args)
                copies += len(made) if isinstance(made, _COPIES) else 0
                if copies > len(content):
                    raise ValueError("its calls copy the same parts too often")
                stack.append(made)
            case "NEWOBJ_EX":
                keywords, args, kind = stack.pop(), stack.pop(), stack.pop()
                stack.append(_call(kind, (args, keywords)))
            case "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], Record):  # a dict's attributes, such as _metadata, are not
                    stack[-1].state = state
            case "BINPERSID" if persistent is not None:
                stack.append(persistent(stack.pop()))
            case "STOP":
                (result,) = stack
                _check_extent(result, _MOST_SHARED * count)
                return result
            case name:
                raise ValueError(f"the instruction {name}")
    raise ValueError("it has no end")


def _inside(value: Any) -> list[Any]:
    match value:
        case dict():
            return [*value, *value.values()]
        case list() | tuple() | set():
            return list(value)
        case Record():
            return [value.args, value.state, value.items]
    return []


def _check_extent(result: Any, most: int) -> None:
    """Raise ValueError if the result is nested too deeply or contains itself, or has more than
    `most` values when all parts are counted as often as they occur. See the note on size.
    """
    extents: dict[int, tuple[int, int]] = {}  # of each part: values in it, and levels
    path: list[_Part] = [_Part(result)]
    while path:
        part = path[-1]
        if part.left:
            item = part.left.pop()
            if id(item) in extents:
                part.add(*extents[id(item)])
            elif _inside(item):
                path.append(_Part(item))
            else:
                part.add(1, 0)
        else:
            path.pop()
            extents[id(part.value)] = part.count, part.levels
            if path:
                path[-1].add(part.count, part.levels)
        if len(path) + part.levels > MOST_LEVELS:
            raise ValueError(f"it is nested more than {MOST_LEVELS} levels deep")
        if part.count > most:
            raise ValueError("its parts contain each other too often")


class _Part:
    """A list, dict or record while what is inside it is counted."""

    def __init__(self, value: Any):
        self.value, self.left = value, _inside(value)
        self.count, self.levels = 1, 1

    def add(self, count: int, levels: int) -> None:
        self.count += count
        self.levels = max(self.levels, levels + 1)


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
_PicklerInPython: Any = vars(pickle)["_Pickler"]


class _Pickler(_PicklerInPython):
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Record):
            self.write(pickle.GLOBAL + f"{obj.kind.module}\n{obj.kind.name}\n".encode())
            self.save(obj.args)
            self.write(pickle.NEWOBJ)
            self.save(obj.state)
            self.write(pickle.BUILD)
        else:
            super().save(obj, save_persistent_id)
