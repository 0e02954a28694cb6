"""Takes a step whose update is slow, and ends, once in each of these ways: `exits.py FOLDER DEVICE
RANKS PORT`, the port of a store.

Each way has processes of its own, which end as a script does that `python` runs. What the ranks
write is in FOLDER: their output, and the threads that live when the last exit handler runs. The
exit codes are printed as JSON."""

import atexit
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path


def print_living_threads() -> None:
    """Registered before all others, so that it is called after them."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    for frame in frames.values():
        traceback.print_stack(frame)
    print(f"{len(frames)} threads alive", flush=True)


if __name__ == "__main__":
    atexit.register(print_living_threads)

# ruff: noqa: E402
import torch
import torch._dynamo
import torch.distributed as dist

import zero
from tests.accelerator import device
from tests.dist.toys import WIDTH, Toy
from tests.dist.training import ds_config
from tests.processes import make_what_forks_inherit
from zero.checkpoint import training
from zero.offload import tiers
from zero.optim.update import SubGroupUpdate

SLOW = 0.1
OFFLOADS = ("cpu", "nvme")
WAYS = ("last line", "sys.exit", "exception", "Ctrl-C")
# Each way with and without `destroy_process_group`, and in turn with each target of offload.
CASES = {
    f"{way}, {'destroyed' if destroys else 'left'}, {offload}": (way, destroys, offload)
    for number, way in enumerate(WAYS)
    for destroys, offload in zip((True, False), OFFLOADS[:: (-1) ** number], strict=True)
}


def slow_down() -> None:
    """Let updates and saves take long, and what an update needed be let go even more slowly: longer
    than all other exit handlers take."""

    def later(call):
        def called(*args):
            time.sleep(SLOW)
            return call(*args)

        return called

    SubGroupUpdate.__call__ = later(SubGroupUpdate.__call__)
    SubGroupUpdate.__del__ = lambda self: time.sleep(10 * SLOW)
    training.write = later(training.write)


def train(folder: str, saves: bool, offload: str) -> None:
    tiers.LEAST_BYTES_IN_A_FILE = 1
    target = {"device": offload, "nvme_path": folder}
    sections = {"offload_param": target, "offload_optimizer": target | {"overlap_step": True}}
    config = ds_config(stage3_param_persistence_threshold=0, **sections)
    config["optimizer"] = {"type": "AdamW"}
    config["checkpoint"] = {"async_save": True}
    engine = zero.initialize(model=Toy(), config=config)[0]
    batch = torch.randn(2, WIDTH, device=engine.comm.device)
    for number in range(2):
        engine.backward(engine(batch).square().mean())
        engine.step()
        if number == 0 and saves:
            engine.save_checkpoint(folder, tag="last")


def become_rank(name: str, kind: str, rank: int, ranks: int, port: int) -> None:
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name} {rank}.{stream}", os.O_WRONLY | os.O_CREAT), descriptor)
    signal.alarm(60)  # nothing outlives a time limit of the test
    way, destroys, offload = CASES[name]
    if kind == "simulated":
        device.register()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=60)
    dist.init_process_group(
        store=dist.PrefixStore(name, store), rank=rank, world_size=ranks, timeout=limit
    )
    slow_down()
    train(name, destroys, offload)  # a save may last longer than the update
    if destroys:
        dist.destroy_process_group()
    if way == "sys.exit":
        sys.exit()
    elif way == "exception":
        raise RuntimeError("planted")
    elif way == "Ctrl-C":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


def main(folder: str, kind: str, ranks: int, port: int) -> None:
    os.chdir(folder)
    make_what_forks_inherit()
    if kind == "simulated":
        device.build()
    gc.freeze()  # otherwise a collection at the end of a fork would copy the pages of all imports
    codes, started = {}, {}
    for name in CASES:
        Path(name).mkdir()
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                become_rank(name, kind, rank, ranks, port)
                return
            started[pid] = f"{name} {rank}"
        while len(started) >= 4 or (name == list(CASES)[-1] and started):
            pid, status = os.wait()
            codes[started.pop(pid)] = os.waitstatus_to_exitcode(status)
    print(json.dumps(codes))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
