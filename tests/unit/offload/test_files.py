"""zero.offload.nvme: mapping and direct I/O show the same values, space is freed when tensors are
freed, and what is left of a file when a process forks or ends.
"""

import errno
import fcntl
import gc
import itertools
import os
import random
import re
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from zero.config import AioConfig
from zero.errors import UsageError
from zero.offload.nvme import ScratchFile
from zero.offload.pinned import PAGE, HostMemory

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
# Requests of two pages, so that small tensors take several.
SMALL = AioConfig(block_size=PAGE, queue_depth=4, thread_count=2)


@pytest.fixture(params=["direct", "bounced", "refused at open", "refused at transfer"])
def way(request, monkeypatch):
    """Set up one way of I/O. Return a function that makes a host tensor for it."""
    if request.param == "refused at open":
        monkeypatch.setattr(os, "open", without_direct(os.open))
    if request.param == "refused at transfer":
        monkeypatch.setattr(os, "preadv", refusing_direct(os.preadv))
        monkeypatch.setattr(os, "pwritev", refusing_direct(os.pwritev))
    memory = HostMemory()

    def host(like: torch.Tensor) -> torch.Tensor:
        if request.param != "bounced":
            return memory.like(like)
        phase = (like.data_ptr() + 64) % PAGE
        return memory.take(like.nbytes, phase).view(like.dtype)

    return host


def failing(real: Callable, holds: Callable[..., object]):
    """A system call that is refused if something holds for its arguments."""

    def call(*args, **options):
        if holds(*args):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(*args, **options)

    return call


def without_direct(real):
    return failing(real, lambda path, flags, *mode: flags & os.O_DIRECT)


def refusing_direct(real):
    return failing(real, lambda file, *args: fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def random_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).random_(0, 256)


def test_slices_of_any_phase_leave_their_neighbours_alone(tmp_path, way, request, caplog):
    file = ScratchFile(tmp_path, SMALL)
    tensor = file.zeros(5 * PAGE, torch.uint8)
    expected = torch.zeros(5 * PAGE, dtype=torch.uint8)
    for phase in range(0, 4096, 128):
        for nbytes in (4, 128, 4096 - phase, 4096, 2 * 4096 + 131, 3 * 4096):
            part = tensor[phase : phase + nbytes]
            host = way(part)
            expected[phase : phase + nbytes] = random_bytes(host)
            file.write(part, host).wait()
            assert torch.equal(tensor, expected), (phase, nbytes)
            expected[phase : phase + nbytes] = random_bytes(part)  # through the mapping
            file.read(part, host).wait()
            assert torch.equal(host, part), (phase, nbytes)
    assert torch.equal(tensor, expected)
    if request.node.callspec.params["way"] == "refused at open":
        (message,) = caplog.messages  # once
        assert f"{tmp_path} does not allow direct I/O" in message


def test_neighbours_in_a_page_are_written_at_the_same_time(tmp_path):
    file = ScratchFile(tmp_path, AioConfig(block_size=PAGE, queue_depth=8, thread_count=8))
    tensor = file.zeros(300_000, torch.uint8)
    order = random.Random(1)
    for _ in range(30):
        cuts = sorted({0, tensor.numel(), *(128 * order.randrange(2343) for _ in range(40))})
        expected = torch.empty(300_000, dtype=torch.uint8).random_(0, 256)
        slices = [slice(*part) for part in itertools.pairwise(cuts)]
        for transfer in [file.write(tensor[each], expected[each].clone()) for each in slices]:
            transfer.wait()
        found = torch.empty_like(expected)
        file.read(tensor, found).wait()
        assert torch.equal(found, expected)
        assert torch.equal(tensor, expected)


def test_mapping_and_transfers_stay_coherent_while_other_regions_are_transferred(tmp_path):
    file = ScratchFile(tmp_path, AioConfig(block_size=PAGE, queue_depth=16, thread_count=4))
    stop = threading.Event()

    def disturb(seed: int) -> int:
        tensor, host = file.empty(50_001, torch.bfloat16), torch.empty(50_001, dtype=torch.bfloat16)
        rounds = 0
        while not stop.is_set():
            file.write(tensor, host.fill_(seed + rounds % 100)).wait()
            file.read(tensor, host.zero_()).wait()
            assert (host == seed + rounds % 100).all()
            tensor.fill_(-1)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(disturb, seed) for seed in range(3)]
        try:
            tensor, host = file.empty(70_003, torch.float32), torch.empty(70_003)
            for number in range(200):
                tensor.fill_(number)
                file.read(tensor, host).wait()
                assert (host == number).all()
                file.write(tensor, host.fill_(number + 0.5)).wait()
                assert (tensor == number + 0.5).all()
        finally:
            stop.set()
        assert all(other.result() > 0 for other in others)


def test_tensors_start_as_zeros_and_their_places_are_used_again(tmp_path):
    file = ScratchFile(tmp_path)
    first = [file.zeros(1000, torch.float32) for _ in range(3)]
    assert not any(tensor.any() for tensor in first)
    addresses = [tensor.data_ptr() for tensor in first]
    for tensor in first:
        tensor.fill_(7)
    last = first.pop()
    view = first[0][10:20]
    del first, tensor
    gc.collect()
    again = file.empty(1000, torch.float32)
    assert again.data_ptr() == addresses[1], "a view keeps the first one alive"
    assert (again == 7).all()
    del view, again
    # Free neighbours are merged into one region, and a new tensor of zeros is cleared.
    joined = file.zeros((4 << 20) // 4, torch.float32)
    assert joined.data_ptr() == addresses[0] and not joined.any()
    assert (last == 7).all()


def test_space_of_freed_tensors_can_be_given_back(tmp_path):
    file = ScratchFile(tmp_path)

    def blocks() -> int:
        return os.fstat(file._file).st_blocks

    kept, *freed = [file.zeros(1 << 20, torch.float32).fill_(7) for _ in range(3)]
    before = blocks()
    file.trim()
    assert blocks() == before
    del freed
    gc.collect()
    file.trim()
    assert blocks() <= before - 2 * (4 << 20) // 512
    assert (kept == 7).all() and not file.zeros(2 << 20, torch.float32).any()
    assert blocks() == before


def test_large_tensors_get_mappings_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("zero.offload.nvme._SEGMENT", 4 << 20)
    file = ScratchFile(tmp_path, SMALL)
    tensors = [file.zeros(numel, torch.uint8) for numel in (100, 6 << 20, 3 << 20, 100, 100)]
    hosts = [torch.empty_like(tensor) for tensor in tensors]
    pairs = enumerate(zip(tensors, hosts, strict=True))
    for transfer in [file.write(tensor, host.fill_(i + 1)) for i, (tensor, host) in pairs]:
        transfer.wait()
    assert all((tensor == number + 1).all() for number, tensor in enumerate(tensors))


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no huge pages")
def test_buffers_ask_for_huge_pages():
    buffer, is_there, flags = HostMemory().take(3 << 20), False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(each, 16) for each in found.groups())
            is_there = first <= buffer.data_ptr() < end
        elif is_there and line.startswith("VmFlags:"):
            flags = line
    assert "hg" in flags.split()


def test_an_empty_tensor_takes_no_place(tmp_path):
    file = ScratchFile(tmp_path)
    tensor = file.empty(0, torch.float32)
    assert tensor.shape == (0,)
    file.read(tensor, torch.empty(0)).wait()


def test_close_waits_for_a_write_whose_values_have_not_arrived(tmp_path):
    file, arrived = ScratchFile(tmp_path, SMALL), threading.Event()
    tensor, source = file.empty(10_007, torch.float32), torch.ones(10_007)
    transfer = file.write(tensor, source, after=arrived.wait)
    closing = threading.Thread(target=file.close, daemon=True)
    closing.start()
    closing.join(timeout=0.3)
    assert closing.is_alive()
    arrived.set()
    closing.join(timeout=60)
    assert not closing.is_alive()
    transfer.wait()
    assert torch.equal(tensor, source)


def test_arguments_that_cannot_be_right(tmp_path):
    file, other = ScratchFile(tmp_path), ScratchFile(tmp_path)
    tensor = file.empty(10, torch.float32)
    with pytest.raises(ValueError, match="not a tensor of this file"):
        other.read(tensor, torch.empty(10))
    with pytest.raises(ValueError, match="40 bytes in the file, 44 in memory"):
        file.read(tensor, torch.empty(11))
    with pytest.raises(ValueError, match="contiguous"):
        file.read(tensor[::2], torch.empty(5))
    file.close()
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.read(tensor, torch.empty(10))
    assert tensor.fill_(3).sum() == 30


def test_folders_are_made_or_refused(tmp_path, caplog):
    folder = tmp_path / "a" / "b"
    ScratchFile(folder)
    assert list(folder.iterdir()) == []
    ScratchFile(folder)
    # One message, when the folder is created.
    assert [record.args[1] for record in caplog.records] == [folder]
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=r"nvme_path: no file can be made in .*/file"):
            ScratchFile(wrong)


def test_a_place_that_could_not_be_reserved_takes_no_space(tmp_path, monkeypatch):
    """On ext4 the failed call keeps all that was left on the disk."""
    file, reserve = ScratchFile(tmp_path), os.posix_fallocate

    def half(descriptor, start, nbytes):
        reserve(descriptor, start, nbytes // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", half)
        with pytest.raises(OSError, match=f"no .* in {tmp_path}: .*; make room") as caught:
            file.empty(8 << 20, torch.uint8)
    assert caught.value.errno == errno.ENOSPC
    del caught
    assert os.fstat(file._file).st_blocks == 0
    assert file.zeros(1000, torch.float32).sum() == 0


def test_the_disk_is_measured_for_a_short_time(tmp_path, monkeypatch):
    file, calls, write = ScratchFile(tmp_path), [], os.pwritev

    def slow(*args):
        calls.append(args)
        time.sleep(0.3)
        return write(*args)

    assert min(file.measure(1 << 20, 60.0)) > 0
    monkeypatch.setattr(os, "pwritev", slow)
    speed, _ = file.measure(32 << 20, 0.2)
    assert 0 < speed < (32 << 20) / 0.3
    # The first write has taken all of the time, in one request for each thread.
    assert len(calls) == 4
    assert not file._regions._taken[1:].count(1), "the places are free again"


# -- how long files and tensors live


def forked(act) -> int:
    """Fork a process that calls `act()`, and return its exit code: 1 after an exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a warning about forking with threads
        child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_is_refused_and_can_drop_what_it_got(tmp_path):
    file = ScratchFile(tmp_path)
    tensors = [file.zeros(1000, torch.float32)]

    def read():
        nonlocal file
        with pytest.raises(ValueError, match="belongs to the process"):
            file.read(tensors[0], torch.empty(1000))
        tensors.clear()
        del file
        gc.collect()

    assert forked(read) == 0
    file.write(tensors[0], torch.ones(1000)).wait()
    assert tensors[0].sum() == 1000


def test_a_file_that_is_dropped_ends_its_threads_and_tensors_outlive_it(tmp_path):
    gc.collect()  # free what earlier tests left
    before = set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    file = ScratchFile(tmp_path)
    tensor = file.empty(1000, torch.float32)
    file.write(tensor, torch.ones(1000)).wait()
    threads = set(threading.enumerate()) - before
    assert len(threads) == file.settings.thread_count
    del file
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert tensor.sum() == 1000
    del tensor
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_tensor_lives_as_long_as_its_transfers(tmp_path):
    file = ScratchFile(tmp_path)
    transfers = [
        file.write(file.empty(1 << 18, torch.float32), torch.ones(1 << 18)) for _ in range(20)
    ]
    for transfer in transfers:
        transfer.wait()
