"""What a process has allocated for itself: to see that nothing is left behind."""

from __future__ import annotations

import ctypes


class MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost",
    )]  # fmt: skip


def private_bytes() -> int:
    """What malloc has given out: what it keeps of memory that was freed does not count."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
