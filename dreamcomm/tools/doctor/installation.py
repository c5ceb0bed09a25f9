"""Checks of the installation: the compiled module, and what it uses on this machine."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from dreamcomm._torch.ddp_memory import VARIABLE, are_shared, has_gpus
from dreamcomm.backend import VARIABLES
from dreamcomm.tools.doctor.finding import Finding, Severity

__all__ = ["buckets", "build", "processors", "settings"]

PREFIX = "DREAMCOMM_"


def build() -> Finding:
    """Whether the compiled module exists, fits the running torch, and loads."""
    import torch

    from dreamcomm._torch.build_check import check_build

    try:
        check_build()
        from dreamcomm import _C
    except ImportError as error:
        return Finding("build", Severity.BROKEN, f"torch {torch.__version__} runs", str(error))
    return Finding(
        "build", Severity.FINE, f"for torch {torch.__version__}; kernels use {_C.instruction_set()}"
    )


def processors() -> Finding:
    """The number of usable processors, which decides how ranks wait."""
    from dreamcomm import _C

    usable, all_of_them = _C.usable_cpus(), os.cpu_count() or 1
    found = f"{usable} of {all_of_them} may be used"
    if usable == 1:
        return Finding("processors", Severity.NOTE, found, "with several ranks each waits its turn")
    limited = "by affinity or the control group; more ranks than these take turns"
    return Finding(
        "processors",
        Severity.NOTE if usable < all_of_them else Severity.FINE,
        found,
        limited if usable < all_of_them else "",
    )


def buckets() -> Finding:
    """Whether DistributedDataParallel takes its buckets from shared memory."""
    about = "buckets of DDP"
    given = os.environ.get(VARIABLE)
    if are_shared() or (given is None and not has_gpus()):
        return Finding(about, Severity.FINE, "come from shared memory, where ranks have it")
    found = f"lie in other memory: {VARIABLE} " + (f"is {given}" if given else "is not set")
    meaning = f"calls on the CPU copy them; {VARIABLE}=0 moves them to shared memory"
    others = ", and those of NCCL's groups to memory that NCCL registers" if has_gpus() else ""
    return Finding(about, Severity.NOTE, found, meaning + others)


def settings() -> Finding:
    """Whether the environment's settings are valid; a group of one rank checks that."""
    from torch._C._distributed_c10d import HashStore

    from dreamcomm import _C
    from dreamcomm._torch.gloo_nccl import make_inner
    from dreamcomm.backend import apply_environment

    given = {name: text for name, text in sorted(os.environ.items()) if name.startswith(PREFIX)}
    options = _C.Options()
    try:
        apply_environment(options)
        _C.DreamBackend(HashStore(), 0, 1, options, make_inner)
    except (RuntimeError, ValueError) as error:
        wrong = [name for name in given if is_named(name, str(error))] or list(given)
        found = ", ".join(f"{name}={given[name]}" for name in wrong) or "none is set"
        return Finding("settings", Severity.BROKEN, found, f"no group can be made: {error}")
    if not given:
        return Finding("settings", Severity.FINE, f"no {PREFIX} variable is set")
    found = ", ".join(f"{name}={text}" for name, text in given.items())
    doubts = [*map(unknown, given), flight_record(given)]
    meaning = "; ".join(["these hold for all groups", *filter(None, doubts)])
    return Finding("settings", Severity.NOTE, found, meaning)


def unknown(variable: str) -> str:
    """A note on a variable that nothing reads, or ""."""
    known = [PREFIX + name for name in VARIABLES]
    if variable in known:
        return ""
    close = get_close_matches(variable, known, n=1)
    return f"but nothing reads {variable}" + (f" (is {close[0]} meant?)" if close else "")


def flight_record(given: dict[str, str]) -> str:
    """The reason that no flight record would be written, or ""."""
    prefix = given.get(f"{PREFIX}FLIGHT_RECORD")
    if not prefix:
        return ""
    if given.get(f"{PREFIX}LOG") != "1":
        return f"but flight records are written of groups that keep a log: set {PREFIX}LOG=1"
    folder = Path(prefix + "0").parent
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return ""  # missing folders are made
    return f"but no file can be written in {folder}"


def is_named(variable: str, error: str) -> bool:
    """Whether the error is about the variable, or about the option that it sets."""
    option = variable.removeprefix(PREFIX).lower()
    return variable in error or f"expected {option} " in error
