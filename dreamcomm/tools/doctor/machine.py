"""Checks of the machine, which do not need the compiled module."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import socket
import tempfile
from pathlib import Path

from dreamcomm.tools.doctor.control_groups import least_memory, read_number
from dreamcomm.tools.doctor.finding import GLOO_INSTEAD, Finding, Severity

__all__ = [
    "address_space",
    "costs",
    "descriptors",
    "endings",
    "gloo",
    "loopback",
    "memory",
    "open_files",
    "shared_memory",
]

MIB = 1 << 20


# Bytes that each of two ranks shares by default, rounded up: less than its heap.
WINDOW = 1_360_000
HEAP = (
    "if the heap for shared tensors does not fit, collectives copy through pages instead: "
    "give it a size that fits, DREAMCOMM_HEAP_BYTES"
)


def shared_memory() -> Finding:
    """Whether anonymous memory can be made, sealed and mapped, as much as a rank needs."""
    about = "shared memory"
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    unlimited = soft == resource.RLIM_INFINITY
    try:
        descriptor = os.memfd_create("dreamcomm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if not unlimited and soft < WINDOW:  # otherwise a signal might end this process
                raise OSError(errno.EFBIG, f"ulimit -f leaves {soft} bytes")
            os.ftruncate(descriptor, WINDOW)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            with mmap.mmap(descriptor, WINDOW) as memory:
                memory[:1] = b"1"
        finally:
            os.close(descriptor)
    except OSError as error:
        return Finding(about, Severity.FALLS_BACK, f"memfd: {error}", GLOO_INSTEAD)
    if not unlimited:
        return Finding(about, Severity.NOTE, f"up to {soft // MIB} MiB, by ulimit -f", HEAP)
    return Finding(about, Severity.FINE, "memfd can be made, sealed and mapped")


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
        return Finding("descriptor passing", Severity.FALLS_BACK, f"failed: {error}", GLOO_INSTEAD)
    return Finding("descriptor passing", Severity.FINE, "works through an abstract Unix socket")


def endings() -> Finding:
    """Whether processes can be watched by a pidfd, which notifies all its holders of their end."""
    about = "watching processes"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            about,
            Severity.NOTE,
            f"pidfd: {error}",
            "groups notice a rank's end by its connections, and so only at the timeout if it is "
            "killed while a process that it has forked lives; allow the system call pidfd_open",
        )
    return Finding(about, Severity.FINE, "a pidfd tells the end of a process")


def open_files() -> Finding:
    """Whether enough files may be open: a group needs about three for each pair of ranks."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < 256
    return Finding(
        "open files",
        Severity.NOTE if few else Severity.FINE,
        "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft}",
        "a group takes some three for each rank; raise it with ulimit -n" if few else "",
    )


def address_space() -> Finding:
    """Whether the heap for shared tensors can reserve addresses for half of the memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    strict = read_number(Path("/proc/sys/vm/overcommit_memory")) == 2
    if soft == resource.RLIM_INFINITY and not strict:
        return Finding("address space", Severity.FINE, "no limit")
    found = "memory is not overcommitted" if strict else f"limited to {soft // MIB} MiB"
    return Finding(
        "address space",
        Severity.NOTE,
        found,
        HEAP,
    )


def memory() -> Finding:
    """The limit of the control group on the machine's memory."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    least = least_memory()
    if least is None or least[0] >= pages:
        return Finding("memory", Severity.FINE, f"{pages // MIB} MiB")
    limit, group = least
    return Finding(
        "memory",
        Severity.NOTE,
        f"{limit // MIB} MiB of the machine's {pages // MIB} MiB, by the control group {group}",
        "shared tensors count towards the limit of the process that touched them first",
    )


def costs() -> Finding:
    """Whether measured costs can be kept for the next start."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "dreamcomm"
    place = folder
    try:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=place):  # permissions alone do not show it
            return Finding("kept costs", Severity.FINE, str(folder))
    except OSError:
        pass
    return Finding(
        "kept costs",
        Severity.NOTE,
        f"{place} cannot be written",
        "every group measures its costs anew, up to a second; set XDG_CACHE_HOME",
    )


def gloo() -> Finding:
    """The address that torch's Gloo, which carries fallbacks, finds for this host's name."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        return gloo_device(chosen)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is too long for DNS
        return Finding(
            "host name",
            Severity.NOTE,
            f"{name}: {error}",
            "Gloo may find no address: set GLOO_SOCKET_IFNAME (lo, if all ranks are here)",
        )
    return Finding("host name", Severity.FINE, f"{name} is {address}")


def loopback() -> Finding:
    """Whether the ranks of a host can connect by TCP, as those of torchrun and spawn do."""
    from dreamcomm.launch.loopback import LOOPBACK, check_loopback

    try:
        check_loopback()
    except OSError as error:
        return Finding("loopback", Severity.BROKEN, "no TCP connection", str(error))
    return Finding("loopback", Severity.FINE, f"{LOOPBACK} can be reached over TCP")


def gloo_device(chosen: str) -> Finding:
    """Whether the network devices that Gloo has to use exist."""
    try:
        there = [name for _, name in socket.if_nameindex()]
    except OSError as error:
        return Finding("host name", Severity.NOTE, f"GLOO_SOCKET_IFNAME={chosen}", str(error))
    missing = [name for name in chosen.split(",") if name not in there]
    found = f"GLOO_SOCKET_IFNAME={chosen}"
    if not missing:
        return Finding(
            "host name", Severity.NOTE, found, "Gloo uses these devices, no other address"
        )
    return Finding(
        "host name",
        Severity.BROKEN,
        found,
        f"there is no {' and no '.join(missing)} here, so whatever goes to Gloo fails; the devices "
        f"are {', '.join(there)}",
    )
