"""What top makes of memory that only looks like a rank's."""

from __future__ import annotations

import fcntl
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dreamcomm import _C
from dreamcomm.observe.top import snapshot, windows
from helpers.pool import Fresh

pytestmark = pytest.mark.beyond_gloo("Gloo shows nothing")

GROUP = b"default\0"


def window_of_this_rank() -> bytes:
    for pid, path in windows(_C.WINDOW_LABEL):
        if pid == os.getpid():
            return path.read_bytes()
    raise AssertionError("this rank has no window")


def look_beside(garbled: bool, sealed: bool) -> tuple[int, list[str]]:
    """With a copy of the rank's window in this process, its group's name garbled or not; how many
    ranks this process seems to be, and their groups."""
    dist.all_reduce(torch.ones(1))
    copy = window_of_this_rank()
    assert GROUP in copy
    if garbled:
        copy = copy.replace(GROUP, b"\xff\xfe" + GROUP[2:])
    (team,) = [state.team for state in snapshot()[0] if state.pid == os.getpid()]
    copy = copy.replace(bytes.fromhex(team), bytes(len(team) // 2))  # another group's
    fd = os.memfd_create(_C.WINDOW_LABEL, os.MFD_ALLOW_SEALING)
    os.write(fd, copy)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    seen: list[Any] = [state for state in snapshot()[0] if state.pid == os.getpid()]
    os.close(fd)
    return len(seen), [state.group for state in seen]


def test_text_that_is_none_is_shown_as_far_as_it_is(fresh: Fresh) -> None:
    count, groups = fresh.run(look_beside, True, True, world=1)[0]
    assert count == 2
    assert sorted(groups) == ["default", "\ufffd\ufffdfault"]


def test_memory_that_may_shrink_is_no_rank(fresh: Fresh) -> None:
    assert fresh.run(look_beside, False, False, world=1)[0][0] == 1
    assert fresh.run(look_beside, False, True, world=1)[0][0] == 2
