"""Communicator() joins the job under each launcher, and no other job."""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

HANG_SECONDS = 120  # No test waits that long; a hang fails here and not in CI's limit.
LAUNCHERS_VARIABLES = re.compile(
    "(OMPI|PMI|PMIX|PRTE|HYDRA|MPI|SLURM|SLURMD|TORCHELASTIC|MASTER|LOCAL)_.*|RANK|WORLD_SIZE"
)
# Two communicators one after the other, with timeouts of their own, and a third that stays open.
USES = """
import os, sys
import numpy as np
import dreamcomm

def use(made):
    part = made.split(made.rank % 2, -made.rank)
    sums = made.all_reduce(np.arange(3.0) + made.rank), part.all_reduce(np.ones(2))
    return part, [made.rank, made.size, *(int(number) for one in sums for number in one)]

found = []
for timeout in (60, 50):
    with dreamcomm.Communicator(timeout=timeout) as made:
        part, numbers = use(made)
        part.close()
    try:
        made.barrier()
    except ValueError:
        found.append(numbers)
if "close" not in sys.argv:
    made = dreamcomm.Communicator(timeout=40)
    part, numbers = use(made)
    found.append(numbers)
text = made.report().partition("started by ")[2].partition(";")[0]
os.write(1, f"{found} {text}\\n".encode())
"""
# The lock is the test's until it has seen what it waits for.
WAITS = """
import fcntl, os, sys
import dreamcomm

lock, token = sys.argv[1:]
made = dreamcomm.Communicator(timeout=60)
made.barrier()
os.write(1, f"{os.getpid()}\\n".encode())
with open(lock) as file:
    fcntl.flock(file, fcntl.LOCK_SH)
os.write(1, f"{made.all_gather_object(token)}\\n".encode())
made.close()
"""
IS_ALONE = """
import os, sys, time
import dreamcomm
from dreamcomm.arrays.environment import read_job

if read_job().rank == int(sys.argv[1]):
    start = time.monotonic()
    try:
        dreamcomm.Communicator(timeout=3)
    except Exception as error:
        seconds = time.monotonic() - start
        os.write(1, f"{seconds} {type(error).__name__}: {error}\\n".encode())
"""
SPAWN = """
import runpy, sys
from dreamcomm import spawn

def run(program, *arguments):
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")

if __name__ == "__main__":
    _, method, init, *arguments = sys.argv
    spawn(run, 2, args=tuple(arguments), start_method=method, init=init == "init")
"""
SHELL = ["sh", "-c", '"$@"; exit $?', "sh"]  # `exit` keeps it from becoming Python itself


class Command(NamedTuple):
    """What starts the ranks of a job, or one of them."""

    words: list[str]
    variables: dict[str, str]


class Launcher(NamedTuple):
    """How jobs are started, and the launcher that their reports name."""

    told: str
    commands: Callable[[Path, list[str]], list[Command]]


def one_process(_: Path, program: list[str]) -> list[Command]:
    return [Command([sys.executable, *program], {})]


def torchrun(folder: Path, program: list[str]) -> list[Command]:
    # Its logs would stay among the temporary files.
    options = ["--standalone", "--nproc-per-node=2", f"--log-dir={folder / 'logs'}"]
    return [Command([sys.executable, "-m", "torch.distributed.run", *options, *program], {})]


def spawn(method: str, init: str) -> Callable[[Path, list[str]], list[Command]]:
    def commands(folder: Path, program: list[str]) -> list[Command]:
        script = folder / "spawn.py"
        script.write_text(SPAWN)
        return [Command([sys.executable, str(script), method, init, *program], {})]

    return commands


# Jobs of other test processes have other ports.
JOB = os.getpid() % 4096
PORT = 2**16 - 4096 + JOB


def slurm(_: Path, program: list[str], job: int = JOB) -> list[Command]:
    """As srun does on one host."""
    step = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": socket.gethostname(),
        "SLURMD_NODENAME": socket.gethostname(),
    }
    ranks = [step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    return [Command([sys.executable, *program], rank) for rank in ranks]


@functools.cache
def mpirun_of(product: str) -> str:
    """The mpirun of "Open MPI" or "HYDRA" (MPICH), or none."""
    for name in ("mpirun.openmpi", "mpirun.mpich", "mpirun"):
        path = shutil.which(name)
        if not path:
            continue
        told = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        if product in told:
            return path
    return ""


def mpirun(product: str, *wrapper: str) -> Callable[[Path, list[str]], list[Command]]:
    def commands(_: Path, program: list[str]) -> list[Command]:
        found = mpirun_of(product)
        if not found:
            pytest.skip(f"needs an mpirun of {'Open MPI' if product == 'Open MPI' else 'MPICH'}")
        options = ["--allow-run-as-root", "--oversubscribe"] if product == "Open MPI" else []
        return [Command([found, *options, "-n", "2", *wrapper, sys.executable, *program], {})]

    return commands


LAUNCHERS = {
    "one process": Launcher("one process", one_process),
    "torchrun": Launcher("torchrun", torchrun),
    "Slurm": Launcher("Slurm", slurm),
    "Open MPI": Launcher("Open MPI", mpirun("Open MPI")),
    "MPICH": Launcher("PMI (MPICH, Intel MPI)", mpirun("HYDRA")),
    "Open MPI, shell": Launcher("Open MPI", mpirun("Open MPI", *SHELL)),
    "MPICH, shell": Launcher("PMI (MPICH, Intel MPI)", mpirun("HYDRA", *SHELL)),
    "fork": Launcher("a torch group", spawn("fork", "init")),
    "fork, init=False": Launcher("torchrun", spawn("fork", "none")),
    "spawn": Launcher("a torch group", spawn("spawn", "init")),
    "spawn, init=False": Launcher("torchrun", spawn("spawn", "none")),
}
JOBS_OF_TWO = ["torchrun", "Slurm", "Open MPI", "MPICH"]


def several(names: list[str], short: list[str]) -> pytest.MarkDecorator:
    """Those that are in the short form, and others."""
    marks = {name: () if name in short else (pytest.mark.long,) for name in names}
    return pytest.mark.parametrize("name", [pytest.param(one, marks=marks[one]) for one in names])


class Ended(NamedTuple):
    lines: list[str]  # those that nobody has read before
    stderr: str
    codes: list[int]


class Job:
    """The processes of a job, and what they say."""

    def __init__(self, commands: list[Command], folder: Path) -> None:
        self._stderr = folder / "stderr"
        self._output, writes = os.pipe()
        self._unread = b""
        others = [name for name in os.environ if not LAUNCHERS_VARIABLES.fullmatch(name)]
        given = {name: os.environ[name] for name in others}
        given |= {"TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
        (folder / "tmp").mkdir(exist_ok=True)
        with self._stderr.open("w") as errors:
            self.processes = [
                subprocess.Popen(
                    command.words,
                    env=given | command.variables,
                    stdin=subprocess.DEVNULL,
                    stdout=writes,
                    stderr=errors,
                    cwd=folder,
                )
                for command in commands
            ]
        os.close(writes)

    def lines(self, count: int | None = None) -> list[str]:
        """The next lines; all that are left when every process has ended."""
        while count is None or self._unread.count(b"\n") < count:
            ready, _, _ = select.select([self._output], [], [], HANG_SECONDS)
            assert ready, f"{self._unread!r}\n{self._stderr.read_text()}"
            part = os.read(self._output, 2**16)
            if not part:
                assert count is None, f"{self._unread!r}\n{self._stderr.read_text()}"
                break
            self._unread += part
        found = self._unread.splitlines(keepends=True)[:count]
        self._unread = self._unread[sum(len(line) for line in found) :]
        return [line.decode().rstrip("\n") for line in found]

    def end(self) -> Ended:
        lines = sorted(self.lines())
        codes = [process.wait(HANG_SECONDS) for process in self.processes]
        return Ended(lines, self._stderr.read_text(), codes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        os.close(self._output)


class Jobs:
    """Starts jobs of programs in one folder, each with a folder of its own in there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = folder / "lock"
        self._held = self.lock.open("w")
        self._started: list[Job] = []
        self._numbers = itertools.count()

    def start(self, commands: list[Command]) -> Job:
        folder = self.folder / f"job-{len(self._started)}"
        folder.mkdir()
        job = Job(commands, folder)
        self._started.append(job)
        return job

    def of(self, name: str, text: str, *arguments: str) -> list[Command]:
        program = self.folder / f"program-{next(self._numbers)}.py"
        program.write_text(text)
        return LAUNCHERS[name].commands(self.folder, [str(program), *arguments])

    def hold(self) -> None:
        fcntl.flock(self._held, fcntl.LOCK_EX)

    def let_go(self) -> None:
        fcntl.flock(self._held, fcntl.LOCK_UN)

    def leftovers(self) -> list[str]:
        return [path.name for folder in self.folder.glob("job-*/tmp") for path in folder.iterdir()]

    def close(self) -> None:
        self._held.close()  # ranks that outlived their launcher go on, and end
        for job in self._started:
            job.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    made.close()


def expected(told: str, size: int, times: int) -> list[str]:
    first = size * (size - 1) // 2
    sums = [first, first + size, first + 2 * size, 1, 1]  # a part has one rank
    return [f"{[[rank, size, *sums]] * times} {told}" for rank in range(size)]


SHORT = ["one process", "torchrun", "Slurm", "Open MPI", "MPICH, shell", "fork"]


@several(list(LAUNCHERS), [*SHORT, "fork, init=False"])
@pytest.mark.parametrize("close", [pytest.param("close", marks=pytest.mark.long), "leave"])
def test_ranks_join_use_leave_and_join_again(jobs: Jobs, name: str, close: str) -> None:
    """Where the launcher has made the group, a closed communicator leaves it as it is."""
    done = jobs.start(jobs.of(name, USES, close)).end()
    size = 1 if name == "one process" else 2
    assert done.stderr == ""
    assert done.lines == expected(LAUNCHERS[name].told, size, 2 if close == "close" else 3)
    assert set(done.codes) == {0}
    assert jobs.leftovers() == []


@several(JOBS_OF_TWO, ["Slurm"])
def test_jobs_at_one_time_do_not_meet(jobs: Jobs, name: str) -> None:
    jobs.hold()
    started = []
    for number, token in enumerate(("one", "other")):
        commands = jobs.of(name, WAITS, str(jobs.lock), token)
        if name == "Slurm":
            commands = slurm(jobs.folder, commands[0].words[1:], JOB + 2000 * number)
        started.append(jobs.start(commands))
    for job in started:
        job.lines(2)
    jobs.let_go()
    for job, token in zip(started, ("one", "other"), strict=True):
        assert job.end() == ([str([token] * 2)] * 2, "", [0] * len(job.processes))
    assert jobs.leftovers() == []


@several([*JOBS_OF_TWO, "fork, init=False"], ["Slurm"])
def test_a_job_follows_a_killed_one(jobs: Jobs, name: str) -> None:
    jobs.hold()
    commands = jobs.of(name, WAITS, str(jobs.lock), "killed")
    killed = jobs.start(commands)
    ranks = [int(line) for line in killed.lines(2)]
    for process in killed.processes:
        process.kill()
    for rank in ranks:
        try:
            os.kill(rank, signal.SIGKILL)
        except ProcessLookupError:  # it has ended with its launcher
            continue
    assert killed.end().lines == []
    jobs.let_go()
    follower = jobs.start([Command([*one.words[:-1], "next"], one.variables) for one in commands])
    lines, stderr, codes = follower.end()
    assert [line for line in lines if not line.isdigit()] == ["['next', 'next']"] * 2
    assert (stderr, codes) == ("", [0] * len(commands))


@several(JOBS_OF_TWO, [])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_missing_rank_is_named(jobs: Jobs, name: str, rank: int) -> None:
    """Ranks of a group have at least 10 s to come."""
    done = jobs.start(jobs.of(name, IS_ALONE, str(rank))).end()
    (line,) = done.lines
    seconds, _, text = line.partition(" ")
    assert f"rank {1 - rank} has not come" in text
    assert float(seconds) < 12
    assert set(done.codes) == {0}


def test_a_missing_server_is_named_with_its_address(jobs: Jobs) -> None:
    (_, alone) = jobs.of("Slurm", IS_ALONE.replace("timeout=3", "timeout=1"), "1")
    (line,), stderr, codes = jobs.start([alone]).end()
    assert line.startswith("1.")  # seconds
    assert "DistStoreError: Communicator on rank 1 of 2, started by Slurm: rank 0 has not" in line
    assert f"within the timeout of 1 s at 127.0.0.1, port {PORT}: [Errno 111] Connection" in line
    assert (stderr, codes) == ("", [0])


@pytest.mark.long
def test_a_port_that_another_job_uses_is_named(jobs: Jobs) -> None:
    """Jobs whose numbers are 4096 apart have one port."""
    jobs.hold()
    first = jobs.start(jobs.of("Slurm", WAITS, str(jobs.lock), "first"))
    first.lines(2)
    program = jobs.of("Slurm", IS_ALONE, "0")[0].words[1:]
    done = jobs.start(slurm(jobs.folder, program, JOB + 4096)[:1]).end()
    assert f"rank 0 has no store at 127.0.0.1, port {PORT}" in done.lines[0]
    assert "Another job may use the port: set MASTER_ADDR and MASTER_PORT" in done.lines[0]
    jobs.let_go()
    assert first.end() == (["['first', 'first']"] * 2, "", [0, 0])


@pytest.mark.long
def test_a_rank_of_another_job_is_not_taken_for_one_of_this(jobs: Jobs) -> None:
    """It has found the store first, as both jobs have one port."""
    (zero, one) = jobs.of("Slurm", USES)
    first = jobs.start([zero])
    text = IS_ALONE.replace("timeout=3", "timeout=15")  # for `first` to start
    program = jobs.of("Slurm", text, "1")[0].words[1:]
    stranger = jobs.start(slurm(jobs.folder, program, JOB + 4096)[1:]).end()
    assert "rank 0 has not come within the timeout of 15000 ms" in stranger.lines[0]
    second = jobs.start([one])
    assert first.end().lines + second.end().lines == expected("Slurm", 2, 3)
