"""Where in the user's program a call was made."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import FrameType

import torch

# Code between a program and the call: torch, this package, Python's own library.
_BETWEEN = tuple(
    os.path.dirname(os.path.abspath(folder)) + os.sep
    for folder in (os.path.dirname(__file__), torch.__file__)
)
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))


def call_site() -> str:
    """The innermost line of this thread that is neither torch's nor dreamcomm's own.

    Returns:
        " at train.py:12 in step", or "" if there is none.
    """
    return _innermost(sys._getframe().f_back)


def main_thread_site() -> str:
    """The innermost such line that the main thread runs now."""
    return _innermost(sys._current_frames().get(threading.main_thread().ident or 0))


def _innermost(frame: FrameType | None) -> str:
    while frame is not None:
        code = frame.f_code
        if not _is_between(code.co_filename):
            text = f" at {_sayable(code.co_filename, 300)}:{frame.f_lineno}"
            return f"{text} in {_sayable(code.co_name, 100)}"
        frame = frame.f_back
    return ""


def _sayable(name: str, most: int) -> str:
    """The last ``most`` bytes of a name in UTF-8. A message would cut off the end instead.

    Bytes of a file's name that are not UTF-8 are escaped: Python holds them as characters that
    UTF-8 cannot encode.
    """
    raw = name.encode("utf-8", "backslashreplace")
    return raw.decode() if len(raw) <= most else "..." + raw[-most:].decode("utf-8", "ignore")


def _is_between(file: str) -> bool:
    if file.startswith((*_BETWEEN, "<frozen")) or os.path.basename(file) == "typing_extensions.py":
        return True
    return file.startswith(_LIBRARY) and not file.startswith(_INSTALLED)
