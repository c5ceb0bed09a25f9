"""Conditions that forward only checks: ``assert a`` and ``if b: raise ...``.

A trace goes on as if the first held and the second did not. The check becomes a node.
"""

from __future__ import annotations

import ast
import linecache
from types import FrameType
from typing import Any

__all__ = ["check", "guard_at"]


def check(condition: Any, expected: bool, text: str) -> None:
    """What a guard becomes.

    Raises:
        AssertionError: the condition of an assert does not hold.
        ValueError: that of an ``if`` with a raise does.
    """
    if bool(condition) != expected:
        raise AssertionError(text) if expected else ValueError(f"forward refuses {text}")


def guard_at(frame: FrameType | None) -> tuple[bool, str] | None:
    """The guard that a frame is at, as what its condition has to be, and its text.

    Each operand of ``and`` in an assert has to hold by itself, and each of ``or`` in an ``if`` has
    to be false. Other combinations are no guards here, as one operand does not decide.

    Returns:
        None where there is no guard, or no source.
    """
    if frame is None:
        return None
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and _is_in(frame.f_lineno, node.test):
            return _guard(node.test, True)
        if isinstance(node, ast.If) and _is_in(frame.f_lineno, node.test):
            is_raise = len(node.body) == 1 and isinstance(node.body[0], ast.Raise)
            return _guard(node.test, False) if is_raise else None
    return None


def _is_in(line: int, test: ast.expr) -> bool:
    return test.lineno <= line <= (test.end_lineno or test.lineno)


def _guard(test: ast.expr, expected: bool) -> tuple[bool, str] | None:
    loose = (ast.Or if expected else ast.And, ast.Not, ast.IfExp)
    for one in ast.walk(test):
        is_chain = isinstance(one, ast.Compare) and len(one.ops) > 1  # a < b < c is an `and`
        if isinstance(one, loose) or (is_chain and not expected):
            return None
    return expected, ast.unparse(test)
