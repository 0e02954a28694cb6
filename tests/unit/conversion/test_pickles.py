"""Files of `torch.save` and `pickle` are read, and nothing in them is executed."""

import io
import os
import random
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from zero.checkpoint.files import Stored
from zero.conversion import pickles
from zero.errors import UsageError

# What happens in this process while `watched` is on.
seen: list[tuple[str, object]] = []
watched = False
EXECUTES = {"compile", "exec", "import", "os.system", "pickle.find_class", "subprocess.Popen"}


def watch(event: str, arguments: tuple) -> None:
    if watched and event in EXECUTES:
        seen.append((event, arguments))


sys.addaudithook(watch)


class Evil:
    def __reduce__(self) -> object:
        return os.system, ("touch executed",)


def content() -> dict:
    whole = torch.arange(12.0)
    tensors = {
        "strided": whole.view(3, 4).t(),
        "part": whole[2:5],
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "step": torch.tensor(3.0),
        "codes": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "flag": True, "none": None, "dtype": torch.half}
    return {"state": OrderedDict(tensors), "param_groups": [options], "shape": torch.Size([2])}


def test_reads_what_torch_saved(tmp_path: Path) -> None:
    saved = content()
    torch.save(saved | {"evil": Evil()}, tmp_path / "file.pt")
    read = pickles.load(tmp_path / "file.pt")
    for name, tensor in saved["state"].items():
        assert torch.equal(read["state"][name].tensor(), tensor)
        first, last = tensor.numel() // 3, tensor.numel()
        assert torch.equal(read["state"][name].read(first, last), tensor.reshape(-1)[first:last])
    assert read["param_groups"] == saved["param_groups"] and read["shape"] == (2,)
    assert str(read["evil"].kind).endswith("system") and read["evil"].args == ("touch executed",)
    left_out: list[str] = []
    values = {"step": read["state"]["step"], "evil": read["evil"]}
    kept = pickles.without_records(values, left_out)
    assert kept == {"step": torch.tensor(3.0)} and left_out == ["evil"]


# The same list, copied by 100 calls.
PAIRS = b"".join(b"J" + number.to_bytes(4, "little") + b"N\x86" for number in range(2000))
COPIES = [
    b"]q\x00(" + PAIRS + b"e0(" + b"c%b\nh\x00\x85R" % kind * 100 + b"l."
    for kind in (b"__builtin__\nset", b"torch\nSize", b"collections\nOrderedDict")
]
NAME = b"cposix\nsystem\n"
DEEP = b")" + b"\x85" * 100_000  # tuples in tuples, whose hash Python computes recursively
MANY = b"(" + b"K\x01" * 20_000 + b"t"


@pytest.mark.parametrize(
    "attack",
    [
        *(pytest.param(each, id=f"copies-{number}") for number, each in enumerate(COPIES)),
        pytest.param(b"]" * 200 + b"a" * 199 + b".", id="deep-lists"),
        pytest.param(b"]q\0" + b"0(h\0h\0lq\0" * 40 + b".", id="wide"),
        pytest.param(b"]q\0h\0a.", id="circular"),
        pytest.param(b"}" + DEEP + b"Ns.", id="deep-key"),
        pytest.param(b"}(" + DEEP + b"Nu.", id="deep-keys"),
        pytest.param(b"(" + DEEP + b"Nd.", id="deep-key-of-a-dict"),
        pytest.param(b"\x8f(" + DEEP + b"\x90.", id="deep-element"),
        pytest.param(b"(" + DEEP + b"\x91.", id="deep-element-of-a-frozenset"),
        pytest.param(b"cbuiltins\nset\n(" + DEEP + b"l\x85R.", id="deep-element-of-a-call"),
        pytest.param(DEEP + b".", id="deep"),
        pytest.param(b"(S'touch executed'\niposix\nsystem\n.", id="INST"),
        pytest.param(b"(" + NAME + b"X\x01\0\0\0ao.", id="OBJ"),
        pytest.param(NAME + b"X\x01\0\0\0aR.", id="text-as-arguments"),
        pytest.param(NAME + b"](NNeR.", id="list-as-arguments"),
        pytest.param(b"X\x05\0\0\0upper)R.", id="call-of-a-text"),
        pytest.param(NAME + b")}\x92.", id="NEWOBJ_EX"),
        pytest.param(b"\x82\x01.", id="EXT1"),
        pytest.param(b"Pname\n.", id="PERSID"),
        pytest.param(b"NQ.", id="BINPERSID"),
        pytest.param(b"\x97.", id="NEXT_BUFFER"),
        pytest.param(b"\x96" + b"\xff" * 4 + b"\0" * 4 + b".", id="huge-bytearray"),
        pytest.param(b"\x8e" + b"\xff" * 4 + b"\0" * 4 + b".", id="huge-bytes"),
        pytest.param(b"X" + b"\xff" * 4 + b".", id="huge-text"),
        pytest.param(b"\x8b\xff\xff\xff\x7f.", id="huge-number"),
        pytest.param(b"\x95" + b"\xff" * 4 + b"\0" * 4 + b".", id="huge-frame"),
        pytest.param(b"N" + b"r" + b"\xff" * 4 + b"0j\xfe\xff\xff\xff.", id="memo"),
        pytest.param(b"c_codecs\nencode\nX\x01\0\0\0aX\x03\0\0\0zip\x86R.", id="codec"),
        pytest.param(
            b"]q\0cc\na\nq\x01" + MANY + b"q\x02" + b"(h\x01h\x02Re" * 9000 + b".",
            id="records-of-one-tuple",
        ),
        pytest.param(
            b"ctorch._utils\n_rebuild_tensor\n(cc\na\n)\x81}(X\x06\0\0\0nbytesJ\xff\xff\xff\x7f"
            b"X\x05\0\0\0dtypectorch\nuint8\nX\x04\0\0\0pathX\x0b\0\0\0/etc/passwd"
            b"X\x08\0\0\0positionK\0ubK\0K\x01\x85K\x01\x85tR.",
            id="a-storage-of-its-own",
        ),
    ],
)
def test_refuses_attacks(tmp_path: Path, attack: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.pkl"
    path.write_bytes(b"\x80\x04" + attack)
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=r"file\.pkl is damaged"):
            pickles.load_plain(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000 + 200 * path.stat().st_size
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "executed").exists()


def test_attributes_are_set_on_records_alone(tmp_path: Path) -> None:
    for target in (b"}", b"]", b")", b"\x8f", b"ctorch\nuint8\n", NAME, b"K\x01"):
        path = tmp_path / "file.pkl"
        path.write_bytes(b"\x80\x04" + target + b"}X\x04\0\0\0readK\x05sb.")
        assert not hasattr(pickles.load_plain(path), "read")


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((13,), (1,), 0),
        ((12,), (1,), 1),
        ((2,), (12,), 0),
        ((5,), (2**62,), 0),
        ((2**62, 4), (0, 0), 0),
        ((2,), (-1,), 5),
        ((-1,), (1,), 0),
        ((1,) * 65, (1,) * 65, 0),
        ((2.0,), (1,), 0),
        ((2, 2), (1,), 0),
        ((1,), (1,), 2**63),
    ],
)
def test_refuses_tensors_that_leave_their_storage(tmp_path: Path, size, stride, offset) -> None:
    arguments = torch.zeros(12)._typed_storage(), offset, size, stride

    class Tensor:
        def __reduce__(self) -> object:
            return torch._utils._rebuild_tensor, arguments

    torch.save(Tensor(), tmp_path / "file.pt")
    with pytest.raises(UsageError, match=r"file\.pt is damaged"):
        pickles.load(tmp_path / "file.pt")


def test_reads_an_archive_within_a_file(tmp_path: Path) -> None:
    """As torch's distributed checkpoints have them."""
    content, places = b"", []
    for number in range(3):
        file = io.BytesIO()
        torch.save({"values": torch.full((5000,), float(number))}, file)
        places.append((len(content), len(content) + len(file.getvalue())))
        content += file.getvalue()
    (tmp_path / "file").write_bytes(content)
    for number, (start, end) in enumerate(places):
        read = pickles.load(tmp_path / "file", start, end)["values"]
        assert torch.equal(read.tensor(), torch.full((5000,), float(number)))
    for start, end in ((-1, 10), (0, 0), (5, 4), (0, len(content) + 1), (0, 50), ("0", 10)):
        with pytest.raises(UsageError, match="is damaged"):
            pickles.load(tmp_path / "file", start, end)  # pyright: ignore[reportArgumentType]


def archive_of(pickled: bytes, entries: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, each in entries.items():
            archive.writestr(name, pickled if name.endswith("data.pkl") else each)
    return file.getvalue()


def mutated(data: bytes, chance: random.Random) -> bytes:
    data = bytearray(data)
    for _ in range(chance.choice((1, 2, 8))):
        start, length = chance.randrange(len(data)), chance.randrange(1, 5)
        match chance.randrange(3):
            case 0:
                data[start : start + length] = chance.randbytes(length)
            case 1:
                del data[start : start + length]
            case _:  # lengths and indices that are huge
                data[start:start] = chance.choice((b"\x8e", b"\x96", b"r", b"T")) + b"\xff" * 7
    return bytes(data)


def tensors_in(value: object) -> list[Stored]:
    if isinstance(value, Stored):
        return [value]
    return [tensor for inside in pickles._inside(value) for tensor in tensors_in(inside)]


def test_mutated_files_execute_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is read or ends in one line, in no more memory than its size explains."""
    global watched
    for encoding in ("cp437", "raw_unicode_escape"):  # Python imports them for zip and pickle
        "".encode(encoding)
    chance, file = random.Random(1), io.BytesIO()
    torch.save(content() | {"evil": Evil()}, file)
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = (data for name, data in entries.items() if name.endswith("data.pkl"))
    monkeypatch.chdir(tmp_path)
    path, refused = tmp_path / "file.pt", 0
    tracemalloc.start()
    try:
        for number in range(400):
            if number % 4:
                path.write_bytes(archive_of(mutated(pickled, chance), entries))
            else:
                path.write_bytes(mutated(file.getvalue(), chance))
            tracemalloc.reset_peak()
            before, watched = tracemalloc.get_traced_memory()[0], True
            try:
                for tensor in tensors_in(pickles.load(path)):
                    assert tensor.nbytes <= path.stat().st_size
                    tensor.tensor()
            except UsageError as error:
                assert str(path) in str(error) and len(str(error).splitlines()) == 1
                refused += 1
            finally:
                watched = False
            assert tracemalloc.get_traced_memory()[1] - before < 200 * path.stat().st_size
    finally:
        tracemalloc.stop()
    assert not seen and not (tmp_path / "executed").exists()
    assert 200 < refused < 400  # some mutations change only a value
