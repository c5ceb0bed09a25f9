"""How forward is called: which arguments are given, and what those are that a branch may hang on.

``if targets is not None`` runs one of two ways. A trace follows one of them, so there is a trace of
its own for each Variant: for each set of given arguments, with the values of those that are None, a
bool or a string. Tensors and numbers differ from call to call within a variant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Given", "Variant", "bind", "likely_variants"]


@dataclass(frozen=True)
class Given:
    """Where forward's parameter ``name`` has its value from.

    Attributes:
        name: the parameter, or the keyword where forward has ``**kwargs``.
        index: of a value in ``*args``; None for others.
        keyword: whether the user gave it by keyword.
    """

    name: str
    index: int | None = None
    keyword: bool = False

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}_{self.index}"


@dataclass(frozen=True)
class Variant:
    """The part of a call's arguments that a trace depends on.

    Attributes:
        given: arguments that stay open in the trace.
        fixed: arguments that the trace has the values of.
    """

    given: tuple[Given, ...]
    fixed: tuple[tuple[Given, Any], ...] = ()

    def call(self, forward: Callable[..., Any], values: dict[Given, Any]) -> Any:
        """Calls ``forward`` with ``values`` for the open arguments, and the fixed ones."""
        signature = inspect.signature(forward)
        names = dict(self.fixed) | values
        args: dict[str, Any] = {}
        spread: dict[int, Any] = {}
        for one, value in names.items():
            if one.index is not None:
                spread[one.index] = value
            else:
                args[one.name] = value
        kinds: list[object] = [inspect.Parameter.POSITIONAL_ONLY]
        if spread:  # those before *args cannot be given by name
            kinds += [inspect.Parameter.POSITIONAL_OR_KEYWORD]
        positional = [
            args.pop(one.name)
            for one in signature.parameters.values()
            if one.name in args and one.kind in kinds
        ]
        return forward(*positional, *(spread[i] for i in sorted(spread)), **args)


def bind(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    fix_numbers: bool = False,
) -> tuple[Variant, dict[Given, Any]]:
    """Sorts a call's arguments.

    Args:
        signature: of forward, without self.
        args, kwargs: the user's.
        fix_numbers: whether a trace depends on the values of numbers too, as in ``range(n)``.

    Returns:
        The variant, and the values of its open arguments.

    Raises:
        TypeError: forward cannot be called so.
    """
    kinds = (bool, str, int, float) if fix_numbers else (bool, str)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    open_values: dict[Given, Any] = {}
    fixed: list[tuple[Given, Any]] = []
    for one, value in _flat(signature, bound.arguments, kwargs):
        if value is None or isinstance(value, kinds):
            fixed.append((one, value))
        else:
            open_values[one] = value
    return Variant(tuple(open_values), tuple(fixed)), open_values


def _flat(
    signature: inspect.Signature, arguments: dict[str, Any], kwargs: dict[str, Any]
) -> Iterator[tuple[Given, Any]]:
    for name, value in arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((Given(name, index), one) for index, one in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((Given(key, keyword=True), one) for key, one in value.items())
        else:
            yield Given(name, keyword=name in kwargs), value


def likely_variants(signature: inspect.Signature, *, fix_numbers: bool = False) -> list[Variant]:
    """Variants to try before the first call is known.

    Args:
        signature: of forward, without self.
        fix_numbers: as for ``bind``.

    Returns:
        First the one with only what forward requires, then those with one optional argument more,
        given by keyword, then the one with all of them.
    """
    stand_in = object()  # neither None nor a bool nor a string, so it stays open
    required, optional = [], []
    for one in signature.parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        if one.default is one.empty:
            required.append(one)
        elif one.default is None and one.kind is not one.POSITIONAL_ONLY:
            optional.append(one.name)
    args = tuple(stand_in for one in required if one.kind is not one.KEYWORD_ONLY)
    named = {one.name: stand_in for one in required if one.kind is one.KEYWORD_ONLY}
    choices: list[list[str]] = [[], *([name] for name in optional), optional]
    calls = [named | dict.fromkeys(one, stand_in) for one in choices]
    made = [bind(signature, args, one, fix_numbers=fix_numbers)[0] for one in calls]
    return list(dict.fromkeys(made))
