"""The namespaces of this process, which must be equal for ranks to find each other."""

from __future__ import annotations

import os
from pathlib import Path

from dreamcomm.tools.doctor.finding import Finding, Severity

__all__ = ["namespaces"]

# The kinds of namespaces, and the effect of different ones. The number of a machine's first
# namespace follows, if it is fixed.
KINDS = {
    "net": (
        None,
        "ranks in several containers share memory if these share a network namespace (docker: "
        "--network=host or container:NAME) and run as one user; else they are several hosts",
    ),
    "pid": (
        4026531836,
        "processes of other PID namespaces do not show in dreamcomm top, and of a late rank there "
        "only its calls are known (docker: --pid=host or container:NAME)",
    ),
    "user": (
        4026531837,
        "ranks of other user namespaces count as another user's, and share no memory with those "
        "here",
    ),
}


def namespaces() -> Finding:
    """The network namespace decides which ranks share memory; the others decide which are seen."""
    try:
        names = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS}
    except OSError as error:
        return Finding("namespaces", Severity.NOTE, f"unknown: {error}")
    in_container = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    meanings = [
        meaning
        for kind, (first, meaning) in KINDS.items()
        if (in_container if first is None else names[kind] != f"{kind}:[{first}]")
    ]
    return Finding(
        "namespaces",
        Severity.NOTE if meanings else Severity.FINE,
        f"{', '.join(names.values())}{', in a container' if in_container else ''}, "
        f"user {os.getuid()}",
        "; ".join(meanings),
    )
