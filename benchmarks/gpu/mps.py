"""NVIDIA's multi-process service, by which kernels of several processes run together on a GPU.

Without it processes take turns: waits between them then take as long as their slices of time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 20  # for a command, and twice as long for the first process that uses it
FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
RUNS = "kernels of all ranks run together (MPS)"


@contextmanager
def multi_process_service(folder: Path) -> Iterator[str]:
    """Starts it for the processes that are started within, and says whether that succeeded.

    One that runs already is used, and left as it is.
    """
    why_not = None if ask("get_server_list") is not None else start(folder)
    if why_not is None:
        why_not = try_a_process()
    started = FOLDERS[0] in os.environ and str(folder) in os.environ[FOLDERS[0]]
    if why_not is not None and started:
        stop()
        started = False
    try:
        yield RUNS if why_not is None else f"processes take turns (no MPS: {why_not})"
    finally:
        if started:
            stop()


def start(folder: Path) -> str | None:
    """The reason that it cannot be started, or None."""
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} is not installed"
    for variable in FOLDERS:
        path = folder / variable.lower()
        path.mkdir(parents=True, exist_ok=True)
        os.environ[variable] = str(path)
    # Into a file: a daemon may keep a pipe open.
    told = folder / "told"
    try:
        with told.open("w") as log:
            done = subprocess.run(
                [CONTROL, "-d"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else first_line(told.read_text()) or "it did not start"


def try_a_process() -> str | None:
    """The reason that a process cannot use the GPU through it, or None."""
    code = "import torch; torch.zeros(1, device='cuda').item()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * SECONDS
        )
    except subprocess.TimeoutExpired:
        return "a process that used it did not end"
    if done.returncode != 0:
        return done.stderr.strip().splitlines()[-1]
    return None if ask("get_server_list") else "no server of it runs"


def ask(words: str) -> str | None:
    """The daemon's answer; None if there is no daemon."""
    if shutil.which(CONTROL) is None:
        return None
    try:
        done = subprocess.run(
            [CONTROL], input=words + "\n", capture_output=True, text=True, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    told = done.stdout.strip()
    return None if done.returncode != 0 or told.startswith("Cannot find") else told


def stop() -> None:
    ask("quit -t 5")
    for variable in FOLDERS:
        os.environ.pop(variable, None)


def first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")
