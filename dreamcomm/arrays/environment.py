"""The job that a launcher describes in this process's environment variables.

Where the user has not set the address of rank 0, it follows from the launcher's variables:

- One host: 127.0.0.1, which needs no name resolution.
- Open MPI: mpirun's host, and a port that follows from mpirun's number. Rank 0 has to run there.
- Slurm: the first host of the step, and a port that follows from the numbers of job and step.
- Hydra: ranks of one host use a file, named by the pid and start time of the process that started
  them. No variable would do: PMI_FD differs between ranks, and is the same in the next job.

torch's ``FileStore`` appends to a file that exists, so a name must not return after a killed job.
"""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = ["Job", "read_job"]

PORTS = 2**12  # the highest ones: Linux takes those of outgoing connections from below
STEP_DISTANCE = 509  # between the ports of two steps of a job: neighbours are those of other jobs
ORTE_JOBS = 2**16  # an mpirun of Open MPI 4 numbers its jobs from a multiple of this
STARTERS = ("hydra", "mpiexec", "mpirun", "orte", "prte")
USELESS = re.compile(r"127\.|169\.254\.|0\.|fe[89ab]|::1?$", re.I)  # own, link-local, or none
PMIX_URIS = " ".join(f"PMIX_SERVER_URI{version}" for version in (51, 41, 4, 3, 21, 2, ""))


@dataclass(frozen=True)
class Job:
    """This process's rank, and how the ranks of its job find each other.

    Attributes:
        rank, size: of the job.
        local_rank, local_size: of the ranks on this host; None if not known.
        launcher: "torchrun", "Slurm", "Open MPI", "PMI (MPICH, Intel MPI)", "PMIx", "one process".
        init_method: for ``torch.distributed.init_process_group``, with rank and size. "env://" is
            read from ``os.environ``.
        name: of the job, if its port follows from its numbers: another job may have that port too.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    launcher: str
    init_method: str
    name: str = field(default="", compare=False)


class _Launcher(NamedTuple):
    """The names of a launcher's variables: alternatives, of which the first that is set counts."""

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    others: str = ""


TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = _Launcher(
    "Open MPI",
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    f"OMPI_MCA_orte_hnp_uri OMPI_MCA_orte_local_daemon_uri PMIX_NAMESPACE {PMIX_URIS}",
)
PMI = _Launcher(
    "PMI (MPICH, Intel MPI)",
    *("PMI_RANK PMI_ID", "PMI_SIZE"),
    *("MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE", "PMI_FD PMI_PORT"),
)
SLURM = _Launcher(
    "Slurm",
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS", "SLURM_LOCALID", ""),
    "SLURM_STEP_NODELIST SLURM_JOB_NODELIST SLURM_JOB_ID SLURM_STEP_ID SLURM_STEP_NUM_NODES "
    "SLURMD_NODENAME",
)
PMIX = _Launcher("PMIx", "PMIX_RANK", "WORLD_SIZE", others="PMIX_NAMESPACE")
JOB_NUMBERS = {OPEN_MPI: "PMIX_NAMESPACE", SLURM: "SLURM_JOB_ID SLURM_STEP_ID"}


class _Variables:
    """Environment variables, by names between spaces: the first that is not empty counts."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._all = environment

    def text(self, names: str) -> str | None:
        return next((self._all[name] for name in names.split() if self._all.get(name)), None)

    def number(self, names: str) -> int | None:
        value = self.text(names)
        if value is not None and not re.fullmatch("[0-9]{1,18}", value):
            raise self.bad("is no number", names)
        return None if value is None else int(value)

    def found(self, names: str) -> list[str]:
        return [f"{name}={self._all[name]}" for name in names.split() if self._all.get(name)]

    def bad(self, why: str, names: str) -> ValueError:
        return ValueError(f"{self.found(names)[0]} {why}")


class _Address(NamedTuple):
    """Where rank 0 is expected; ``is_here`` is False if this process runs on another host."""

    host: str | None = None
    port: int | None = None
    is_here: bool = True
    missing: str = ""


def read_job(environment: Mapping[str, str] | None = None) -> Job:
    """Reads the job from environment variables (``os.environ``); starts and creates nothing.

    The first of these counts: torchrun and ``dreamcomm.spawn``, Open MPI, PMI, Slurm. An mpirun
    inside a Slurm job thus counts before the variables of the batch script. MASTER_ADDR and
    MASTER_PORT count before an address that follows from a launcher's own variables.

    Raises:
        ValueError: a variable is malformed, out of range or missing.
    """
    variables = _Variables(os.environ if environment is None else environment)
    launcher = _launcher(variables)
    if launcher is None:
        if variables.number("WORLD_SIZE") not in (None, 1):
            raise variables.bad("is set, and RANK is not", "WORLD_SIZE")
        return Job(0, 1, 0, 1, "one process", _file(uuid.uuid4().hex))
    rank, size = variables.number(launcher.rank), variables.number(launcher.size)
    if rank is None or size is None:
        raise _failure(variables, launcher, "its number of ranks is not known", launcher.size)
    local_rank = variables.number(launcher.local_rank)
    local_size = variables.number(launcher.local_size)
    if launcher is SLURM and variables.number("SLURM_STEP_NUM_NODES") == 1:
        local_size = size
    if rank >= size:
        raise variables.bad(f"is out of range for {size} ranks", launcher.rank)
    if local_size is not None and launcher is not SLURM and not 1 <= local_size <= size:
        raise variables.bad(f"is out of range for {size} ranks", launcher.local_size)
    if local_rank is not None and local_rank >= (local_size or size):
        raise variables.bad(f"is out of range for {local_size or size} ranks", launcher.local_rank)
    init_method = _init_method(variables, launcher, rank, size, local_size)
    name = "" if _master(variables) else ".".join(variables.found(JOB_NUMBERS.get(launcher, "")))
    return Job(rank, size, local_rank, local_size, launcher.name, init_method, name)


def _launcher(variables: _Variables) -> _Launcher | None:
    order = [TORCHRUN, OPEN_MPI, PMI, SLURM, PMIX]
    found = next((one for one in order if variables.text(one.rank)), None)
    # srun's PMI plugins set PMI_RANK as well, and only Hydra sets MPI_LOCALRANKID. Hydra may start
    # its proxies with srun: then the ranks inherit a SLURM_PROCID that is the proxy's.
    if found is PMI and variables.text("SLURM_STEP_ID") and not variables.text("MPI_LOCALRANKID"):
        same = variables.number(PMI.rank) == variables.number(SLURM.rank)
        same &= variables.number(PMI.size) in (None, variables.number(SLURM.size))
        return SLURM if same else PMI
    return found


def _init_method(
    variables: _Variables, launcher: _Launcher, rank: int, size: int, local_size: int | None
) -> str:
    master = _master(variables)
    if master is not None:
        return "env://" if launcher is TORCHRUN else master
    if size == 1:
        return _file(uuid.uuid4().hex)
    address = _Address(missing="" if local_size else launcher.local_size)
    if launcher in (OPEN_MPI, SLURM):
        address = _slurm(variables) if launcher is SLURM else _open_mpi(variables)
    why, missing = "the address of rank 0 is not known", "MASTER_ADDR, MASTER_PORT"
    if local_size == size:
        if address.port is not None:
            return _tcp("127.0.0.1", address.port)
        name = _starter(variables, launcher) if launcher in (OPEN_MPI, PMI) else None
        if name is not None:
            return _file(name)
    elif address.host is not None and address.port is not None:
        if rank or address.is_here:
            return _tcp(address.host, address.port)
        why = f"rank 0 does not run on {address.host}, where the other ranks expect it"
    if address.missing:
        missing = f"{address.missing}; or {missing}"
    raise _failure(variables, launcher, why, missing)


def _failure(variables: _Variables, launcher: _Launcher, why: str, missing: str) -> ValueError:
    found = variables.found(" ".join((*launcher[1:], "MASTER_ADDR MASTER_PORT")))
    counts = "" if variables.number(launcher.size) else "RANK, WORLD_SIZE, "
    return ValueError(
        f"{launcher.name} started this process, and {why}. Found: {', '.join(found)}. Missing: "
        f"{missing}. Set {counts}MASTER_ADDR and MASTER_PORT (the host of rank 0, and a free port "
        "there) on all ranks, or start them with torchrun"
    )


def _master(variables: _Variables) -> str | None:
    """The address that the user has set."""
    host, port = variables.text("MASTER_ADDR"), variables.number("MASTER_PORT")
    if host is None and port is None:
        return None
    if host is None or port is None:
        missing = "MASTER_ADDR" if host is None else "MASTER_PORT"
        raise variables.bad(f"is set, and {missing} is not", "MASTER_ADDR MASTER_PORT")
    if not 0 < port < 2**16:
        raise variables.bad("is no port", "MASTER_PORT")
    return _tcp(host, port)


def _open_mpi(variables: _Variables) -> _Address:
    """Reads the URI of mpirun: "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"."""
    name = "OMPI_MCA_orte_hnp_uri"
    uri = variables.text(name)
    if uri is None:
        return _open_mpi_5(variables)
    parts = re.match(r"([0-9]+)\.[0-9]+;", uri)
    if parts is None:
        raise variables.bad("is no URI of an mpirun", name)
    hosts = re.findall(r"tcp6?://\[?([^\]/;]+?)\]?:[0-9]+(?=;|$)", uri)
    host = next((one for one in ",".join(hosts).split(",") if not USELESS.match(one)), None)
    daemon = variables.text("OMPI_MCA_orte_local_daemon_uri")
    is_here = daemon is None or daemon.startswith(f"{parts[1]}.0;")
    missing = "" if host else f"an address in {name} that other hosts can reach"
    return _Address(host or None, _port(int(parts[1]) // ORTE_JOBS), is_here, missing)


def _open_mpi_5(variables: _Variables) -> _Address:
    """Reads the name of the job: "prterun-HOST-PID@JOB", with mpirun's host and pid.

    PMIX_SERVER_URI names the daemon of each host. Its address is mostly 127.0.0.1; its number is 0
    on mpirun's host.
    """
    parts = re.fullmatch(r"[^-]+-(.+)-([0-9]+)@([0-9]+)", variables.text("PMIX_NAMESPACE") or "")
    if parts is None:
        return _Address(missing="OMPI_MCA_orte_hnp_uri or PMIX_NAMESPACE")
    daemon = re.search(r"@0\.([0-9]+);", variables.text(PMIX_URIS) or "")
    port = _port(int(parts[2]) + STEP_DISTANCE * (int(parts[3]) - 1))
    return _Address(parts[1], port, daemon is None or int(daemon[1]) == 0)


def _slurm(variables: _Variables) -> _Address:
    step, job = variables.number("SLURM_STEP_ID"), variables.number("SLURM_JOB_ID")
    if step is None and variables.text("SLURM_STEP_NUM_TASKS SLURM_STEP_NODELIST") is None:
        return _Address(missing="SLURM_STEP_ID (a batch script runs once; srun starts the ranks)")
    host = _first_host(variables, "SLURM_STEP_NODELIST SLURM_JOB_NODELIST")
    port = None if job is None else _port(job + STEP_DISTANCE * (step or 0))
    is_here = variables.text("SLURMD_NODENAME") in (None, host)
    given = {"SLURM_STEP_NODELIST": host, "SLURM_JOB_ID": port}
    return _Address(host, port, is_here, ", ".join(one for one in given if given[one] is None))


def _first_host(variables: _Variables, names: str) -> str | None:
    """The first host of a list such as "n[003-005,9],m1": n003."""
    nodes = variables.text(names)
    if nodes is None:
        return None
    parts = re.match(r"((?:[^\s,\[\]]|\[[0-9][0-9,-]*\])+)(?:,|$)", nodes)
    if parts is None:
        raise variables.bad("is no list of nodes", names)
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", parts[1])


def _starter(variables: _Variables, launcher: _Launcher) -> str | None:
    """Names the process that started the ranks of this host: its pid and start time.

    It is the nearest ancestor that has a launcher's name, or that was not started with this rank's
    variables, which a shell around a rank was. None if /proc does not show it, as in a container.
    """
    names = f"{launcher.rank} {launcher.local_rank}"
    pid = os.getppid()
    try:
        while pid > 1:
            entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            given = _Variables(dict(entry.partition("=")[::2] for entry in entries))
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            is_launcher = name.partition("(")[2].startswith(STARTERS)
            fields = rest.split()
            if is_launcher or given.found(names) != variables.found(names):
                return f"{pid}-{fields[19]}"
            pid = int(fields[1])
    except OSError:
        pass
    return None


def _port(number: int) -> int:
    return 2**16 - PORTS + number % PORTS


def _tcp(host: str, port: int) -> str:
    return f"tcp://[{host.strip('[]')}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _file(name: str) -> str:
    return f"file://{tempfile.gettempdir()}/dreamcomm-{os.getuid()}-{name}"
