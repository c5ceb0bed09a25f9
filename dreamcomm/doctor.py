"""Looks at the installation and the machine: what works, what falls back, and why, in words.

Every check is a function that returns a :class:`Finding` and raises nothing; :func:`examine` runs
them in order. Only the last starts processes; those of torchrun look for each other instead.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import Enum
from itertools import dropwhile
from pathlib import Path

__all__ = ["Finding", "State", "examine"]

MIB = 1 << 20
SECONDS = 60.0  # for two ranks to meet


class State(Enum):
    """How much a finding matters."""

    FINE = "fine"
    NOTE = "note"  # works; good to know
    FALLS_BACK = "falls back"  # something slower serves instead
    BROKEN = "broken"  # dreamcomm does not work here


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: what it is, in a word or two.
        state: how much it matters.
        found: what was seen.
        meaning: what follows from it and what to do; empty where all is fine.
    """

    about: str
    state: State
    found: str
    meaning: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self) | {"state": self.state.value}


def build() -> Finding:
    """Whether the compiled module is there, fits the running torch, and loads."""
    import torch

    from dreamcomm._compat import check_build

    try:
        check_build()
        from dreamcomm import _C
    except ImportError as error:
        return Finding("build", State.BROKEN, f"torch {torch.__version__} runs", str(error))
    return Finding(
        "build", State.FINE, f"for torch {torch.__version__}; kernels use {_C.instruction_set()}"
    )


def processors() -> Finding:
    """How many may be used, which decides how ranks wait."""
    from dreamcomm import _C

    usable, all_of_them = _C.usable_cpus(), os.cpu_count() or 1
    found = f"{usable} of {all_of_them} may be used"
    if usable == 1:
        return Finding("processors", State.NOTE, found, "with several ranks each waits its turn")
    limited = "by affinity or the control group; more ranks than these take turns"
    return Finding(
        "processors",
        State.NOTE if usable < all_of_them else State.FINE,
        found,
        limited if usable < all_of_them else "",
    )


def shared_memory() -> Finding:
    """Whether anonymous memory can be made, sealed and mapped."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    try:
        descriptor = os.memfd_create("dreamcomm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
                memory[:1] = b"1"
        finally:
            os.close(descriptor)
    except OSError as error:
        return Finding("shared memory", State.FALLS_BACK, f"memfd: {error}", GLOO_INSTEAD)
    return Finding("shared memory", State.FINE, "memfd can be made, sealed and mapped")


GLOO_INSTEAD = "ranks cannot share memory: groups go to torch's Gloo, which is slower"


def descriptors() -> Finding:
    """Whether one process can hand memory to another through a socket, as ranks do."""
    name = f"\0dreamcomm-doctor-{os.getpid()}"
    try:
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind(name)
            server.listen(1)
            client.connect(name)
            peer, _ = server.accept()
            with peer, tempfile.TemporaryFile() as file:
                socket.send_fds(client, [b"x"], [file.fileno()])
                _, received, _, _ = socket.recv_fds(peer, 1, 1)
                os.close(received[0])
    except (OSError, IndexError) as error:
        return Finding("descriptor passing", State.FALLS_BACK, f"failed: {error}", GLOO_INSTEAD)
    return Finding("descriptor passing", State.FINE, "works through an abstract Unix socket")


def namespaces() -> Finding:
    """What must be equal for ranks to find each other."""
    try:
        name = os.readlink("/proc/self/ns/net")
    except OSError as error:
        return Finding("namespaces", State.NOTE, f"unknown: {error}")
    in_container = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    meaning = (
        "ranks in several containers share memory if these share a network namespace (docker: "
        "--network=host or container:NAME) and run as one user; else they go to Gloo"
    )
    return Finding(
        "namespaces",
        State.NOTE if in_container else State.FINE,
        f"{name}{', in a container' if in_container else ''}, user {os.getuid()}",
        meaning if in_container else "",
    )


def open_files() -> Finding:
    """A group takes about three descriptors for each pair of ranks."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < 256
    return Finding(
        "open files",
        State.NOTE if few else State.FINE,
        "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft}",
        "a group takes some three for each rank; raise it with ulimit -n" if few else "",
    )


def address_space() -> Finding:
    """The heap for shared tensors reserves half of the memory, in addresses."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    strict = read_number(Path("/proc/sys/vm/overcommit_memory")) == 2
    if soft == resource.RLIM_INFINITY and not strict:
        return Finding("address space", State.FINE, "no limit")
    found = "memory is not overcommitted" if strict else f"limited to {soft // MIB} MiB"
    return Finding(
        "address space",
        State.NOTE,
        found,
        "if the heap for shared tensors does not fit, collectives copy through pages instead: "
        "give it a size that fits, DREAMCOMM_HEAP_BYTES",
    )


def memory() -> Finding:
    """What the control group leaves of the machine's memory."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = read_number(Path("/sys/fs/cgroup/memory.max")) or read_number(
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    )
    if limit is None or limit >= pages:
        return Finding("memory", State.FINE, f"{pages // MIB} MiB")
    return Finding(
        "memory",
        State.NOTE,
        f"{limit // MIB} MiB of the machine's {pages // MIB} MiB, by the control group",
        "shared tensors count towards the limit of the process that touched them first",
    )


def costs() -> Finding:
    """Whether measured costs can be kept for the next start."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "dreamcomm"
    place = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    if os.access(place, os.W_OK):
        return Finding("kept costs", State.FINE, str(folder))
    return Finding(
        "kept costs",
        State.NOTE,
        f"{place} cannot be written",
        "every group measures its costs anew, up to a second; set XDG_CACHE_HOME",
    )


def cuda() -> Finding:
    """What CUDA tensors have here."""
    import torch

    from dreamcomm import _C

    count, why = _C.cuda_devices()
    built = _C.cuda_runtime_version()
    ours = f"kernels of CUDA {built // 1000}.{built % 1000 // 10}" if built else "no kernels"
    if count == 0:
        return Finding("CUDA", State.NOTE, f"{ours}; no device", f"{why}; tensors on cpu only")
    theirs = torch.version.cuda
    if theirs is None:
        meaning = "this torch is a CPU build: it makes no tensors on cuda"
    else:
        meaning = "collectives on cuda tensors go to torch's NCCL; ops.pack and unpack run here"
    return Finding("CUDA", State.NOTE, f"{ours}; {count} device(s); torch has {theirs}", meaning)


def gloo() -> Finding:
    """What torch's Gloo, which carries what falls back, makes of this host's name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding(
            "host name",
            State.NOTE,
            f"{name}: {error}",
            "Gloo may find no address: set GLOO_SOCKET_IFNAME (lo, if all ranks are here)",
        )
    return Finding("host name", State.FINE, f"{name} is {address}")


def carried_by() -> str:
    """In a rank: what carries a group's bytes, after a call has gone through."""
    import torch
    import torch.distributed as dist

    from dreamcomm.info import transport

    data = torch.ones(1000)
    dist.all_reduce(data)
    return f"{transport()}; 1 + 1 = {data[0].item():g}"


def settings() -> Finding:
    """Whether what the environment says has a meaning; a group of one rank finds that out."""
    from torch._C._distributed_c10d import HashStore

    from dreamcomm import _C
    from dreamcomm.backend import apply_environment, make_inner

    given = {name: text for name, text in sorted(os.environ.items()) if name.startswith(PREFIX)}
    options = _C.Options()
    try:
        apply_environment(options)
        _C.DreamBackend(HashStore(), 0, 1, options, make_inner)
    except (RuntimeError, ValueError) as error:
        wrong = [name for name in given if is_named(name, str(error))] or list(given)
        found = ", ".join(f"{name}={given[name]}" for name in wrong)
        return Finding("settings", State.BROKEN, found, f"no group can be made: {error}")
    if not given:
        return Finding("settings", State.FINE, f"no {PREFIX} variable is set")
    found = ", ".join(f"{name}={text}" for name, text in given.items())
    return Finding("settings", State.NOTE, found, "these hold for all groups")


PREFIX = "DREAMCOMM_"


def is_named(variable: str, error: str) -> bool:
    """Whether the error is about the variable, or about the option that it sets."""
    option = variable.removeprefix(PREFIX).lower()
    return variable in error or f"expected {option} " in error


def two_ranks() -> Finding:
    """Two processes that meet and add, as in a job."""
    from dreamcomm.launch import RankError, spawn

    try:
        first, _ = spawn(carried_by, 2, timeout=SECONDS, start_method="spawn")
    except RankError as error:
        raised = last_words(error.traceback or "")
        why = f"rank {error.rank} raised {raised}" if raised else str(error)
        return Finding("two ranks", State.BROKEN, "failed", why)
    except (OSError, ValueError) as error:
        return Finding("two ranks", State.BROKEN, "failed", str(error))
    state = State.FINE if first.startswith("shm") else State.FALLS_BACK
    return Finding("two ranks", state, first, "" if state is State.FINE else GLOO_INSTEAD)


def last_words(traceback: str) -> str:
    """The error that a traceback ends with, which may have several lines."""
    lines = traceback.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    return "\n".join(dropwhile(lambda line: line.startswith(" "), lines))


def hosts() -> Finding:
    """Collective, in the ranks of a job: which of them share memory, and why others do not."""
    import torch.distributed as dist

    from dreamcomm.info import backend_of, explain, transport

    try:
        dist.init_process_group("dreamcomm", timeout=timedelta(seconds=SECONDS))
    except (RuntimeError, ValueError) as error:
        return Finding("hosts", State.BROKEN, "the ranks could not meet", str(error))
    try:
        backend = backend_of(None)
        if not backend.shares_memory:
            return Finding("hosts", State.FALLS_BACK, transport(), GLOO_INSTEAD)
        if len(backend.hosts) == 1:
            return Finding("hosts", State.FINE, transport())
        meaning = f"{backend._reason}\n{explain('all_reduce', 1 << 20)}"
        return Finding("hosts", State.NOTE, transport(), meaning)
    finally:
        dist.destroy_process_group()


def read_number(path: Path) -> int | None:
    """None if there is no such file, or it holds no number ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


ALWAYS: tuple[Callable[[], Finding], ...] = (
    shared_memory, descriptors, namespaces, open_files, address_space, memory, costs, gloo,
)  # fmt: skip
WITH_BUILD: tuple[Callable[[], Finding], ...] = (processors, cuda, settings, two_ranks)


def examine() -> Iterator[Finding]:
    """Runs the checks; those that need the compiled module only where it loads.

    In a job of torchrun the first rank of each machine runs them, and all ranks the one of hosts.
    """
    if in_job():
        if os.environ.get("LOCAL_RANK") == "0":
            yield from examine_here()
        found = hosts()
        if os.environ["RANK"] == "0" or found.state is State.BROKEN:
            yield found
        return
    yield from examine_here()


def in_job() -> bool:
    """Whether torchrun has started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def examine_here() -> Iterator[Finding]:
    """The checks of this machine."""
    first = build()
    yield first
    for check in ALWAYS:
        yield check()
    if first.state is State.BROKEN:
        return
    for check in WITH_BUILD:
        found = check()
        yield found
        if found.state is State.BROKEN:  # the next would fail of the same
            return
