"""Where in the user's program a call was made."""

from __future__ import annotations

import os
import sys

import torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


def call_site() -> str:
    """The innermost line of this thread that is neither torch's nor dreamcomm's own.

    Returns:
        " at train.py:12 in step", or "" if there is none.
    """
    frame = sys._getframe().f_back
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_HERE + os.sep, _TORCH + os.sep, "<frozen")):
            return f" at {code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""
