"""The life of one rank process: join the group, then answer cases until the parent is gone."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection, wait

from tests.distributed.outcomes import Outcome, Raised, Returned


def serve(rank: int, world_size: int, port: int, connection: Connection, log: str) -> None:
    """Answer every case that comes over `connection`; SIGUSR1 writes its stacks to `log`."""
    _write_to(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a group holds several
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's own name may not resolve

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    connection.send_bytes(pickle.dumps(Returned(os.getpid())))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # not sys.exit: threads of a broken group may never end
        torch.manual_seed(0)
        connection.send_bytes(_answer(message, rank, world_size))
        sys.stdout.flush()
        sys.stderr.flush()


def _answer(message: bytes, rank: int, world_size: int) -> bytes:
    outcome: Outcome
    try:
        fn, args = pickle.loads(message)
        outcome = Returned(fn(rank, world_size, *args))
        return pickle.dumps(outcome)
    except BaseException as error:
        outcome = Raised(
            error=f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        )
        return pickle.dumps(outcome)


def _write_to(log: str) -> None:
    """Send this process's stdout and stderr, C++ output included, to the file `log`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
