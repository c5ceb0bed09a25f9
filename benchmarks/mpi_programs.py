"""Finds the MPIs of this machine, compiles the timing program with each, and runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).parent / "mpi" / "all_reduce.c"
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
# Variables of the ranks that a launcher started from one must not see.
FOREIGN = ("OMPI_", "PMI_", "PMIX_", "I_MPI_", "HYDRA_")


class MpiError(Exception):
    """An MPI program did not compile or run; the text has its command line."""


@dataclass(frozen=True)
class Mpi:
    """One MPI with one choice of settings, and the program compiled for it."""

    name: str
    version: str
    launcher: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    program: str = ""

    def time_all_reduce(self, ranks: int, bytes: int, samples: int, in_place: bool) -> float:
        """Microseconds of a call, p50."""
        program = [self.program, str(samples), str(int(in_place)), str(bytes)]
        command = [*self.launcher, "-n", str(ranks), *program]
        kept = {name: v for name, v in os.environ.items() if not name.startswith(FOREIGN)}
        return float(json.loads(output_of(command, kept | self.environment))["p50_us"])


def output_of(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        said = (done.stderr + done.stdout).strip()[-2000:]
        raise MpiError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout


def find_mpis(prefixes: list[Path], build: Path) -> list[Mpi]:
    """Every MPI on PATH, beside this Python and below ``prefixes``, compiled into ``build``."""
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
        program = compile_program(compiler, build / f"all_reduce_{len(found)}", environment)
        found[real] = settings_of(launcher, environment, program)
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


def settings_of(launcher: Path, environment: dict[str, str], program: str) -> list[Mpi]:
    """The MPI with the settings that are fastest between processes of one host."""
    version = output_of([str(launcher), "--version"], {**os.environ, **environment})
    command = [str(launcher)]
    if "Open MPI" in version or "OpenRTE" in version:
        line = version.splitlines()[0]
        command += ["--bind-to", "core"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
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
