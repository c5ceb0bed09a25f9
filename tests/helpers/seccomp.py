"""System calls that are refused from here on, as a container's seccomp profile does it."""

from __future__ import annotations

import ctypes
import platform
import struct

# The numbers of x86-64 and aarch64.
NUMBERS = {
    "memfd_create": {"x86_64": 319, "aarch64": 279},
    "pidfd_open": {"x86_64": 434, "aarch64": 434},
}
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # of classic BPF: a word, a jump, the verdict
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


class Program(ctypes.Structure):
    """The kernel's sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def refuse(call: str, error: int) -> None:
    """The call fails with the error, in this thread, those it starts, and all their children."""
    number = NUMBERS[call][platform.machine()]
    steps = [
        (LOAD, 0, 0, 0),  # the call's number
        (EQUAL, 0, 1, number),
        (RETURN, 0, 0, ERRNO | error),
        (RETURN, 0, 0, ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = Program(len(steps), code)
    libc = ctypes.CDLL(None, use_errno=True)
    for words in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*words) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({words[0]}) failed")
