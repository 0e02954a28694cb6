"""Files of `torch.save` and `pickle` are read, and nothing in them is executed."""

import io
import os
import pickle
import random
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from zero.conversion import pickles
from zero.conversion.training_state import Stored
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
    kept, left_out = pickles.without_records({"step": read["state"]["step"], "evil": read["evil"]})
    assert kept == {"step": torch.tensor(3.0)} and left_out == ["evil"]


def nested(levels: int, times: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value] * times
    return value


def circle() -> list:
    value: list = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        pytest.param(nested(100, 1), "levels deep", id="deep"),
        pytest.param(nested(40, 2), "too often", id="wide"),
        pytest.param(circle(), "levels deep", id="circular"),
    ],
)
def test_refuses_what_would_grow(tmp_path: Path, value: list, why: str) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps(value))
    with pytest.raises(UsageError, match=why):
        pickles.load_plain(tmp_path / "file")


@pytest.mark.parametrize("kind", ["__builtin__ set", "torch Size", "collections OrderedDict"])
def test_refuses_calls_that_copy_one_list_many_times(tmp_path: Path, kind: str) -> None:
    pairs = b"".join(b"J" + number.to_bytes(4, "little") + b"N\x86" for number in range(2000))
    one_copy = b"c" + kind.replace(" ", "\n").encode() + b"\nh\x00\x85R"
    (tmp_path / "file").write_bytes(b"\x80\x02]q\x00(" + pairs + b"e0(" + one_copy * 100 + b"l.")
    with pytest.raises(UsageError, match="copy the same parts too often"):
        pickles.load_plain(tmp_path / "file")


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


def test_a_thousand_mutated_files_execute_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        for number in range(1000):
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
    assert 500 < refused < 1000  # some mutations change only a value
