"""zero.offload.pinned: buffers for direct I/O are used again, and pinned as long as they live."""

import ctypes
import gc
import logging

import torch

from zero import device
from zero.offload.pinned import PAGE, HostMemory


def test_host_memory_has_the_phase_that_is_asked_for_and_is_used_again():
    memory = HostMemory()
    buffer = memory.take(5000, phase=384)
    assert buffer.shape == (5000,) and buffer.data_ptr() % PAGE == 384
    address, part = buffer.data_ptr() - 384, buffer.view(torch.float32)[3:5]
    del buffer
    assert memory.take(5000).data_ptr() != address, "a part of it is in use"
    del part
    assert address in {memory.take(5000).data_ptr() for _ in range(2)}


class Runtime:
    """Stands for the device's runtime. It returns a fixed code, and records what is registered."""

    def __init__(self, code: int):
        self.code = code
        self.registered = set()

    def pin(self, address, size):
        assert ctypes.string_at(address, size) == bytes(size)
        self.registered |= {address} if self.code == 0 else set()
        return self.code

    def unpin(self, address, memory, device):
        ctypes.string_at(address, 1)
        self.registered.remove(address)


def pinned_memory(monkeypatch, code: int) -> tuple[Runtime, HostMemory]:
    runtime = Runtime(code)
    monkeypatch.setattr(device, "can_register", lambda: True)
    monkeypatch.setattr(device, "pin", runtime.pin)
    monkeypatch.setattr(device, "unpin", runtime.unpin)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    return runtime, HostMemory(pin=True)


def test_pinned_memory_is_registered_as_long_as_it_lives(monkeypatch):
    runtime, memory = pinned_memory(monkeypatch, code=0)
    kept, freed = memory.take(100, phase=128), memory.take(100)
    assert runtime.registered == {kept.data_ptr() - 128, freed.data_ptr()}
    del freed
    memory.trim()
    gc.collect()
    assert runtime.registered == {kept.data_ptr() - 128}
    del memory, kept
    gc.collect()
    assert runtime.registered == set()


def test_memory_that_cannot_be_pinned_is_pageable_and_told_once(monkeypatch, caplog):
    runtime, memory = pinned_memory(monkeypatch, code=2)
    with caplog.at_level(logging.WARNING):
        assert memory.take(100).numel() == memory.take(100).numel() == 100
    assert runtime.registered == set()
    (record,) = caplog.records
    assert "cannot pin 4096 bytes" in record.message and "CUDA error 2" in record.message
    assert "(ulimit -l)" in record.message
