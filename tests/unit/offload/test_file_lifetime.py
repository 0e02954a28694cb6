"""zero.offload.nvme: what is left of a file when a process forks or ends, and how long tensors
live.
"""

import gc
import os
import threading
import warnings

import pytest
import torch

from zero.offload.nvme import ScratchFile


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
