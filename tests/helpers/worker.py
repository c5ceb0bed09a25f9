"""The program of one rank: runs the calls that come in, one after another.

    python worker.py DESCRIPTOR    # a Unix socket to the test process

It imports torch once and forks ranks on request. Not imported by tests; they start it through
nursery.Nursery.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
PR_SET_PDEATHSIG = 1

# A rank's first optimizer imports torch._dynamo, which takes longer than most tests.
IMPORTED_ONCE = (
    "dreamcomm",
    "dreamcomm.pipeline",
    "dreamcomm.zero",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
)


def main(descriptor: int) -> None:
    end_with_parent()
    sys.path[0] = str(TESTS)  # in place of this file's own folder
    rank = fork_on_request(socket.socket(fileno=descriptor))
    if rank is not None:
        serve(Connection(rank))


def end_with_parent() -> None:
    """The kernel ends this process with its parent, whatever becomes of that one."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def fork_on_request(control: socket.socket) -> int | None:
    """Returns in each child, with its connection to the tests, and in the parent at the end."""
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    while True:
        message, files, _, _ = socket.recv_fds(control, 1 << 20, 2)
        if not message:
            return None
        what = pickle.loads(message)
        if "fork" in what:
            pid = os.fork()
            if pid == 0:
                control.close()
                return become_rank(what["fork"], *files)
            for file in files:
                os.close(file)
            answer = pid
        else:
            ((how, child),) = what.items()
            ended, status = os.waitpid(child, 0 if how == "wait" else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        control.send(pickle.dumps(answer))


def become_rank(env: dict[str, str], connection: int, log: int) -> int:
    end_with_parent()
    os.setsid()
    os.environ.clear()
    os.environ.update(env, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    faulthandler.enable()
    return connection


def serve(connection: Connection) -> None:
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        # Not connection.send: it would share tensors' memory instead of copying it.
        connection.send_bytes(pickle.dumps(answer(call)))


def answer(call: Any) -> Any:
    from helpers.calls import Reply

    try:
        with environment(call.env):
            return Reply(value=perform(call))
    except (Exception, KeyboardInterrupt):
        return Reply(error=traceback.format_exc())


def perform(call: Any) -> Any:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    function = load(call.file, call.name)
    if call.group is None:
        return function(call.rank, *call.args, **call.kwargs)
    with process_group(call.group, call.rank):
        return function(*call.args, **call.kwargs)


@contextmanager
def process_group(group: Any, rank: int) -> Iterator[None]:
    """The default process group, destroyed at the end and after an error at once, so that
    peers that wait for this rank learn of it."""
    import torch.distributed as dist

    options = None
    if group.options is not None:
        import dreamcomm

        options = dreamcomm.Options(**group.options)
    dist.init_process_group(
        group.backend,
        store=dist.FileStore(group.store, group.world),
        rank=rank,
        world_size=group.world,
        timeout=timedelta(seconds=group.timeout),
        pg_options=options,
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()


def forget_meshes() -> None:
    """DTensor's caches tell meshes apart by ranks: a later test would get an old one's group."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        for name in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
            getattr(debug, name, lambda: None)()


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def load(file: str, name: str) -> Callable[..., Any]:
    """The function `name` of the module in `file`, imported once."""
    module_name = "ranks_" + "_".join(Path(file).with_suffix("").parts[-2:])
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(int(sys.argv[1]))
