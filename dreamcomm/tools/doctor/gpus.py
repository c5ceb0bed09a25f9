"""Checks for tensors on GPUs."""

from __future__ import annotations

import itertools
import os

from dreamcomm.tools.doctor.finding import Finding, Severity

__all__ = ["cuda", "peers"]


def cuda() -> Finding:
    """The carrier of CUDA tensors here."""
    import torch

    from dreamcomm import _C

    count, why = _C.cuda_devices()
    built = _C.cuda_runtime_version()
    ours = f"kernels of CUDA {built // 1000}.{built % 1000 // 10}" if built else "no kernels"
    if count == 0:
        return Finding("CUDA", Severity.NOTE, f"{ours}; no device", f"{why}; tensors on cpu only")
    theirs = torch.version.cuda
    if theirs is None:
        meaning = "this torch is a CPU build: it makes no tensors on cuda"
    elif os.environ.get("DREAMCOMM_CUDA") != "dreamcomm":
        meaning = (
            "collectives on cuda tensors go to torch's NCCL, or by this library's kernels with "
            "DREAMCOMM_CUDA=dreamcomm; ops.pack and unpack run here"
        )
    elif built:
        meaning = (
            "collectives on cuda tensors go by this library's kernels, as DREAMCOMM_CUDA says, "
            "where all ranks' GPUs can be reached; what they do not do goes to torch's NCCL"
        )
    else:
        meaning = (
            "DREAMCOMM_CUDA=dreamcomm has no effect: this build has no kernels, so collectives on "
            "cuda tensors go to torch's NCCL; install dreamcomm again with nvcc on PATH and "
            "DREAMCOMM_BUILD_CUDA=on in the environment"
        )
    return Finding("CUDA", Severity.NOTE, f"{ours}; {count} device(s); torch has {theirs}", meaning)


def peers() -> Finding:
    """The GPUs that can read each other's memory, as the kernels do."""
    import torch

    about = "GPU peers"
    count = torch.cuda.device_count()
    if count < 2:
        return Finding(about, Severity.FINE, "one device" if count else "no device")
    try:
        apart = [
            f"{one} and {other}"
            for one, other in itertools.combinations(range(count), 2)
            if not (
                torch.cuda.can_device_access_peer(one, other)
                and torch.cuda.can_device_access_peer(other, one)
            )
        ]
    except (RuntimeError, AssertionError) as error:
        return Finding(about, Severity.NOTE, f"unknown: {error}")
    if not apart:
        return Finding(about, Severity.FINE, f"all {count} devices can read each other's memory")
    kernels = os.environ.get("DREAMCOMM_CUDA") == "dreamcomm"
    return Finding(
        about,
        Severity.FALLS_BACK if kernels else Severity.NOTE,
        f"these cannot read each other's memory: {', '.join(apart)}",
        "calls of ranks on these go to torch's NCCL, also with DREAMCOMM_CUDA=dreamcomm",
    )
