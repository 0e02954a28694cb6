"""Adam on host memory: the bits of torch's fused Adam, however tensors are cut; and what is done
without a compiler.
"""

import logging
import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from zero.optim import adam_cpu
from zero.optim.adam_cpu import build
from zero.optim.update import SubGroupUpdate

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
DECAYS = [(0.0, True), (0.1, True), (0.1, False)]
SIXTEEN_BITS = [torch.bfloat16, torch.float16]
EVERY_16_BITS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)

COMPILER = shlex.split(os.environ.get("CXX") or "c++")[0]
needs_compiler = pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs {COMPILER}")


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory):
    """Build once for all tests.

    Three threads, which stand for ranks, ask for it at once. Return what each got.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        adam_cpu._kernel.cache_clear()
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(adam_cpu._kernel.__wrapped__) for _ in range(3)]
        yield [call.result() for call in calls]
        adam_cpu._kernel.cache_clear()


def state(numel, seed=0):
    """Return a master and its two moments before the first step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator), torch.zeros(numel), torch.zeros(numel)]


def gradient(numel, dtype, step):
    """Return gradients of all magnitudes, with zeros and subnormals.

    From step 40 on some are infinite or NaN.
    """
    generator = torch.Generator().manual_seed(step)
    grad, size = torch.randn(2, numel, generator=generator)
    grad *= size.mul(4).exp()
    grad[step % 3 :: 5] = 0.0
    grad[step % 4 :: 7] = 1e-7 if dtype is torch.float16 else 1e-40
    if step >= 40:
        grad[step % 11 :: 11] = float("inf")
        grad[step % 13 :: 13] = float("nan")
    return grad.to(dtype)


def bits(tensor):
    """Return the bits. All NaN count as equal."""
    integers = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    return integers.masked_fill(tensor.isnan(), 0x7FC0)


def assert_same_bits(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(bits(a), bits(b))


class Reference:
    """torch's own fused optimizer on a copy of `tensors`.

    The copy has 64 elements more. So the fused step takes none of ours as one of the last few,
    which it computes otherwise.
    """

    def __init__(self, tensors, decay, decoupled, beta1=SETTINGS["betas"][0]):
        self.numel = len(tensors[0])
        self.param, *self.moments = [functional.pad(tensor, (0, 64)) for tensor in tensors]
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        betas = (beta1, SETTINGS["betas"][1])
        self.optimizer = kind([self.param], 1e-2, betas, SETTINGS["eps"], decay, fused=True)

    def step(self, grad, factor, number):
        exp_avg, exp_avg_sq = self.moments
        self.param.grad = functional.pad(grad.float() * factor, (0, 64))
        state = {"step": torch.tensor(number - 1.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self.optimizer.state[self.param] = state
        self.optimizer.step()
        return [tensor[: self.numel] for tensor in (self.param, exp_avg, exp_avg_sq)]


def adam(tensors, grad, out=None, step=1, decay=0.0, decoupled=True, factor=1.0, **settings):
    master, exp_avg, exp_avg_sq = tensors
    decays = {"weight_decay": decay, "decoupled_weight_decay": decoupled}
    adam_cpu.adam(
        master, grad, exp_avg, exp_avg_sq, out, SETTINGS | settings | decays, step, factor
    )


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "beta1"), [(torch.float32, 0.9), (torch.bfloat16, 0.3), (torch.float16, 0.9)]
)
@pytest.mark.parametrize(("decay", "decoupled"), DECAYS)
def test_fifty_steps_have_the_bits_of_torch(decay, decoupled, dtype, beta1):
    """Wherever a piece of a tensor begins and ends."""
    for begin, end in ((0, 1), (0, 7), (0, 8), (0, 15), (0, 1003), (5, 700), (64, 129)):
        ours, out = [each[begin:end] for each in state(1003)], torch.empty(1003).bfloat16()
        reference = Reference(ours, decay, decoupled, beta1)
        for step in range(1, 51):
            grad, factor = gradient(1003, dtype, step), (1.0, 0.37, 2.0**-16)[step % 3]
            grad, copy = grad[begin:end], out[begin:end]
            adam(ours, grad, copy, step, decay, decoupled, factor, betas=(beta1, 0.95))
            assert_same_bits(ours, reference.step(grad, factor, step))
            assert_same_bits([copy], [ours[0].bfloat16()])


@needs_compiler
def test_many_pieces_on_several_threads_have_the_bits_of_torch(monkeypatch):
    monkeypatch.setattr(adam_cpu, "thread_count", lambda: 3)
    ours, out = state(1_000_003), torch.empty(1_000_003, dtype=torch.bfloat16)
    reference = Reference(ours, 0.1, True)
    for step in (1, 2):
        grad = gradient(1_000_003, torch.bfloat16, step)
        adam(ours, grad, out, step, 0.1, factor=0.37)
        assert_same_bits(ours, reference.step(grad, 0.37, step))
    assert torch.equal(out, ours[0].bfloat16())


@pytest.mark.parametrize(("decay", "decoupled"), DECAYS)
def test_without_a_compiler_the_last_elements_differ_little(decay, decoupled, monkeypatch):
    """There torch's fused step computes, which takes up to 15 elements in another precision."""
    monkeypatch.setattr(adam_cpu, "is_compiled", lambda: False)
    ours = state(1003)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([ours[0]], 1e-2, SETTINGS["betas"], 1e-8, decay)
    for step in range(1, 20):
        grad, before = gradient(1003, torch.bfloat16, step), ours[0].clone()
        expected = Reference(ours, decay, decoupled).step(grad, 0.37, step)
        update = SubGroupUpdate(optimizer, 0.37, is_plain_adam=True)
        sub_group = SimpleNamespace(group_index=0, master=ours[0])
        kept = {"step": torch.tensor(step - 1.0), "exp_avg": ours[1], "exp_avg_sq": ours[2]}
        values = SimpleNamespace(sub_group=sub_group, master=ours[0], grad=grad, state=kept)
        assert update(values) is ours[0]
        assert values.state["step"] == step
        body = [tensor[:-15] for tensor in ours]
        assert_same_bits(body, [tensor[:-15] for tensor in expected])
        assert_same_bits(ours[1:2], expected[1:2])
        assert ((bits(ours[2]) - bits(expected[2])).abs() <= 2).all()
        change = (ours[0] - before).abs() + SETTINGS["lr"] * decay * before.abs()
        assert ((ours[0] - expected[0]).abs() <= change * 2**-21 + before.abs() * 2**-23).all()
        assert not optimizer.param_groups[0]["fused"]


@needs_compiler
def test_calls_from_several_threads_at_once(monkeypatch):
    monkeypatch.setattr(adam_cpu, "PIECE", 100)
    monkeypatch.setattr(adam_cpu, "thread_count", lambda: 2)
    grad, expected = gradient(10_007, torch.bfloat16, 1), state(10_007)
    adam(expected, grad)
    results = [state(10_007) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda tensors: adam(tensors, grad), results))
    for tensors in results:
        assert_same_bits(tensors, expected)


@needs_compiler
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_every_16_bit_gradient_is_read_as_torch_reads_it(dtype):
    grad = EVERY_16_BITS.view(dtype)
    ours = [torch.zeros(len(grad)) for _ in range(3)]
    expected = Reference(ours, 0.0, True).step(grad, 1.0, 1)
    adam(ours, grad)
    assert_same_bits(ours[1:2], expected[1:2])


@needs_compiler
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_the_copy_is_rounded_as_torch_rounds(dtype):
    """Every value of the 16-bit type, the ties between two of them, and their neighbours in
    fp32.
    """
    exact = EVERY_16_BITS.view(dtype).float().view(torch.int32)
    tie = 1 << (15 if dtype is torch.bfloat16 else 12)
    subnormal = (torch.rand(10_000) * 2.0**-13).view(torch.int32)
    near = [exact + offset for offset in (0, 1, tie - 1, tie, tie + 1)]
    master = torch.cat([*near, subnormal]).view(torch.float32)
    out = torch.empty(len(master), dtype=dtype)
    grad, *moments = torch.zeros(3, len(master))
    adam([master, *moments], grad, out, lr=0.0)
    assert_same_bits([out], [master.to(dtype)])


@needs_compiler
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("grad", lambda tensor: tensor[:-1], r"grad must be .* shape \(4,\) .* shape \(3,\)"),
        ("grad", lambda tensor: tensor.double(), "grad must be .* torch.float32 or torch.bfloat16"),
        ("exp_avg_sq", lambda tensor: torch.zeros(8)[::2], "exp_avg_sq must be contiguous"),
        ("out", lambda tensor: tensor.float(), "out must be"),
        ("grad", lambda tensor: tensor.to("meta"), "on meta"),
    ],
)
def test_other_tensors_are_refused(name, change, message):
    tensors = {key: torch.zeros(4) for key in ("master", "exp_avg", "exp_avg_sq", "grad")}
    tensors["out"] = torch.zeros(4, dtype=torch.bfloat16)
    tensors[name] = change(tensors[name])
    *state, grad, out = tensors.values()
    with pytest.raises(ValueError, match=message):
        adam(state, grad, out)


# -- building


@pytest.fixture
def afresh(monkeypatch):
    """Act as a process that has not built the kernel, and build it without optimization, which
    takes a third of the time.

    Afterwards the shared kernel is there again.
    """
    monkeypatch.setattr(adam_cpu, "_kernel", adam_cpu._kernel.__wrapped__)
    monkeypatch.setattr(build, "FLAGS", quickly(build.FLAGS))


def quickly(flags):
    return [flag.replace("-O3", "-O0") for flag in flags]


@needs_compiler
def test_ranks_that_build_at_once_all_get_the_kernel(kernels):
    assert None not in kernels
    assert len(list(Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/*.so"))) == 1


@needs_compiler
@pytest.mark.parametrize(
    ("text", "said"), [("this is not C++", "error"), ("int other() { return 1; }", "zero_cpu_adam")]
)
def test_a_kernel_that_cannot_be_built(text, said, afresh, tmp_path, monkeypatch, caplog):
    source = tmp_path / "adam_cpu.cpp"
    source.write_text(text)
    monkeypatch.setattr(build, "SOURCE", source)
    assert adam_cpu._kernel() is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "falls back on torch's fused kernel" in caplog.text and said in caplog.text


def test_no_compiler_is_no_warning(afresh, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with caplog.at_level(logging.INFO, logger="zero"):
        assert adam_cpu._kernel() is None
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "found no no-such-compiler" in caplog.text


def libraries() -> list[Path]:
    return sorted(Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/*.so"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder of extensions with a kernel that is built as `afresh` does."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
        patch.setattr(build, "FLAGS", quickly(build.FLAGS))
        build.load_library()
    return folder


@pytest.fixture
def library(afresh, compiled, tmp_path, monkeypatch):
    """The kernel in the folder that is in use, one for each test."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(shutil.copytree(compiled, tmp_path / "mine")))
    (found,) = libraries()
    assert found.parent.stat().st_mode & 0o777 == 0o700
    return found


@needs_compiler
def test_libraries_of_other_cpus_have_other_names(library, monkeypatch):
    build.load_library()
    assert libraries() == [library]
    flags = tuple(flag for flag in build.FLAGS if flag != "-march=native")
    monkeypatch.setattr(build, "FLAGS", flags)
    build.load_library()
    assert len(libraries()) == 2


PLANTED = "__attribute__((constructor)) void run() { __builtin_trap(); }"


def plant(tmp_path: Path, library: Path) -> None:
    """Replace the kernel by a library that ends any process that loads it."""
    source = tmp_path / "planted.cpp"
    source.write_text(PLANTED)
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)


@needs_compiler
def test_a_library_that_is_not_what_was_compiled_is_not_loaded(library, tmp_path):
    library.unlink()
    plant(tmp_path, library)
    assert adam_cpu._kernel() is not None and libraries() == [library]


def planted_for(library: Path, tmp_path: Path) -> Path:
    """Replace the kernel by another library, which has the name that belongs to its content."""
    plant(tmp_path, library)
    name = f"{library.name[:33]}{build._hash(library.read_bytes())}.so"
    return library.rename(library.with_name(name))


def change(path: Path, how: str, tmp_path: Path) -> None:
    """Make a file or folder one that is not, or not only, under this user's control."""
    if how == "writable":
        path.chmod(0o777)
    elif how == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        pytest.skip("only root can give a file away")


@needs_compiler
@pytest.mark.parametrize("what", ["folder", "library"])
@pytest.mark.parametrize("how", ["writable", "link", "not ours"])
def test_what_others_can_write_to_is_not_loaded(how, what, library, tmp_path, caplog):
    """A library may be older than the folder's present mode, or come from a backup."""
    planted = planted_for(library, tmp_path)
    content = planted.read_bytes()
    change(planted.parent if what == "folder" else planted, how, tmp_path)
    assert adam_cpu._kernel() is not None
    if what == "library":
        assert set(libraries()) == {planted, library}, "compiled again"
    else:
        assert libraries() == [planted] and planted.read_bytes() == content
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "nobody else can write" in caplog.text


@pytest.mark.parametrize(
    ("cores", "ranks", "omp", "expected"),
    [
        *((8, None, None, 8), (8, None, "3", 3), (8, None, "1", 1), (8, "4", None, 2)),
        *((8, "4", "1", 2), (8, "4", "3", 3), (2, "4", "1", 1), (2, None, "64", 2)),
        *((4, "1", "0", 4), (4, "1", "2,1", 4)),
    ],
)
def test_threads(cores, ranks, omp, expected, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    for name, value in (("LOCAL_WORLD_SIZE", ranks), ("OMP_NUM_THREADS", omp)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert adam_cpu.thread_count() == expected


def test_a_default_dtype_that_scripts_set_changes_nothing():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert adam_cpu.new_state(torch.ones(3).float())["step"].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
