"""Finds the MPIs of this machine, and runs the timing program with each: from C, or mpi4py's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parent / "mpi" / "all_reduce.c"
PYTHON_PROGRAM = Path(__file__).parent / "numpy_all_reduce.py"
# Debian's names where several are installed, then the usual ones.
COMMANDS = (
    ("mpicc.openmpi", "mpirun.openmpi"),
    ("mpicc.mpich", "mpirun.mpich"),
    ("mpicc", "mpirun"),
)
INSTALL = (
    "no MPI found: install one, for example with "
    "`apt-get install openmpi-bin libopenmpi-dev mpich libmpich-dev`, or "
    "`pip install --prefix DIR impi-rt impi-devel` and give --prefix DIR"
)
INSTALL_MPI4PY = (
    "this Python has no mpi4py: install it with `pip install mpi4py`, or with "
    "`pip install --target DIR mpi4py` and put DIR on PYTHONPATH"
)
# By the number of the library that mpi4py from PyPI is linked with, libmpi.so.NUMBER.
ABIS = {"12": "mpich", "40": "openmpi"}
# Variables of the ranks that a launcher started from one must not see.
FOREIGN = ("OMPI_", "PMI_", "PMIX_", "I_MPI_", "HYDRA_")


class MpiError(Exception):
    """An MPI program did not compile or run; the text has its command line."""


@dataclass(frozen=True)
class Mpi:
    """One MPI with one choice of settings, and the command of its timing program."""

    name: str
    version: str
    launcher: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    program: list[str] = field(default_factory=list)

    def time_all_reduce(self, ranks: int, bytes: int, samples: int, in_place: bool) -> float:
        """Microseconds of a call, p50."""
        program = [*self.program, str(samples), str(int(in_place)), str(bytes)]
        command = [*self.launcher, "-n", str(ranks), *program]
        kept = {name: v for name, v in os.environ.items() if not name.startswith(FOREIGN)}
        return float(json.loads(output_of(command, kept | self.environment))["p50_us"])


def output_of(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        said = (done.stderr + done.stdout).strip()[-2000:]
        raise MpiError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout


def find_mpis(
    prefixes: list[Path], build: Path, *, python: bool = False, yields: bool = False
) -> list[Mpi]:
    """Every MPI on PATH, beside this Python and below ``prefixes``, compiled into ``build``.

    ``python``: its program is mpi4py's. ``yields``: ranks of Open MPI that wait yield.
    """
    found: dict[Path, list[Mpi]] = {}
    for compiler, launcher in places([*prefixes, Path(sys.prefix)]):
        real = launcher.resolve()
        if real in found:
            continue
        environment = {}
        if any(launcher.is_relative_to(prefix) for prefix in prefixes):
            # Intel's from pip has no script that would set this; its launcher calls others by name.
            home = launcher.parent.parent
            environment = {
                "I_MPI_ROOT": str(home),
                "LD_LIBRARY_PATH": str(home / "lib"),
                "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            }
        compiled = compile_program(compiler, build / f"all_reduce_{len(found)}", environment)
        program = [compiled]
        if python:
            program = [sys.executable, str(PYTHON_PROGRAM)]
            environment = environment | mpi4py_environment(compiled, environment)
        found[real] = settings_of(launcher, environment, program, yields)
    if not found:
        raise MpiError(INSTALL)
    return [mpi for choices in found.values() for mpi in choices]


def places(prefixes: list[Path]) -> list[tuple[Path, Path]]:
    folders = [str(prefix / "bin") for prefix in prefixes]
    found = []
    for path in [*folders, os.environ.get("PATH", os.defpath)]:
        for pair in COMMANDS:
            compiler, launcher = (shutil.which(name, path=path) for name in pair)
            if compiler and launcher:
                found.append((Path(compiler), Path(launcher)))
    return found


def compile_program(compiler: Path, program: Path, environment: dict[str, str]) -> str:
    flags = ["-std=gnu11", "-O3", "-Wall", "-Wextra"]
    output_of(
        [str(compiler), *flags, "-o", str(program), str(SOURCE)], {**os.environ, **environment}
    )
    return str(program)


def mpi4py_environment(compiled: str, environment: dict[str, str]) -> dict[str, str]:
    """Variables with which mpi4py is found, and loads the library of a compiled program.

    mpi4py from PyPI asks the loader for libmpi.so.12 or libmpi.so.40. Debian calls MPICH's library
    libmpich.so.12, so a link beside the program has the name that is asked for.
    """
    spec = importlib.util.find_spec("mpi4py")
    if spec is None or spec.origin is None:
        raise MpiError(INSTALL_MPI4PY)
    now = {**os.environ, **environment}
    needs = output_of(["ldd", compiled], now)
    library = re.search(r"libmpi(?:ch)?\.so\.(\d+) => (/\S+)", needs)
    if library is None or library[1] not in ABIS:
        raise MpiError(f"mpi4py knows no MPI library of these:\n{needs}")
    links = Path(f"{compiled}_libraries")
    links.mkdir()
    (links / f"libmpi.so.{library[1]}").symlink_to(library[2])
    return {
        "MPI4PY_MPIABI": ABIS[library[1]],
        "LD_LIBRARY_PATH": first_of_path(links, now.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": first_of_path(Path(spec.origin).parents[1], now.get("PYTHONPATH")),
    }


def first_of_path(folder: Path, path: str | None) -> str:
    return f"{folder}{os.pathsep}{path}" if path else str(folder)


def settings_of(
    launcher: Path, environment: dict[str, str], program: list[str], yields: bool
) -> list[Mpi]:
    """The MPI with the settings that are fastest between processes of one host."""
    version = output_of([str(launcher), "--version"], {**os.environ, **environment})
    command = [str(launcher)]
    if "Open MPI" in version or "OpenRTE" in version:
        line = version.splitlines()[0]
        command += ["--bind-to", "core"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        if yields:
            command += ["--mca", "mpi_yield_when_idle", "1"]
        # Copies by system call help at some sizes and hurt at others.
        staged = [*command, "--mca", "btl_vader_single_copy_mechanism", "none"]
        return [
            Mpi("Open MPI", line, command, environment, program),
            Mpi("Open MPI staged", line, staged, environment, program),
        ]
    if "Intel" in version:
        settings = {**environment, "I_MPI_FABRICS": "shm", "I_MPI_PIN": "1"}
        return [Mpi("Intel MPI", version.splitlines()[0], command, settings, program)]
    line = next((line.strip() for line in version.splitlines() if "Version:" in line), "unknown")
    return [Mpi("MPICH", line, [*command, "-bind-to", "core"], environment, program)]
