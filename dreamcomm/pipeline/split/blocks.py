"""Finds the list of blocks of a module, between which it can be cut."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["block_lists", "entered_modules", "named_lists"]


def block_lists(module: nn.Module) -> list[tuple[str, ...]]:
    """Guesses which children are the blocks.

    Args:
        module: the whole.

    Returns:
        Names of lists (nn.ModuleList or nn.Sequential with two or more children, not inside another
        such list), those of one length together, the longest first.
    """
    lengths: dict[int, list[str]] = {}
    _collect(module, "", lengths)
    return [tuple(lengths[length]) for length in sorted(lengths, reverse=True)]


def _collect(module: nn.Module, prefix: str, lengths: dict[int, list[str]]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1:
            lengths.setdefault(len(child), []).append(path)
        else:
            _collect(child, f"{path}.", lengths)


def named_lists(module: nn.Module, blocks: str | Sequence[str]) -> tuple[str, ...]:
    """Checks the names of lists that the user gave.

    Raises:
        ValueError: there is no such child, or it has no children.
    """
    names = (blocks,) if isinstance(blocks, str) else tuple(blocks)
    modules = dict(module.named_modules(remove_duplicate=False))
    for name in names:
        if name not in modules or not any(True for _ in modules[name].children()):
            known = [one for group in block_lists(module) for one in group]
            raise ValueError(
                f"blocks={name!r} names no child of {type(module).__name__} that has children; "
                f"its lists are {known}"
            )
    return names


def entered_modules(module: nn.Module, lists: Sequence[str]) -> set[int]:
    """The ids of modules whose forward is followed: the lists, and what they are inside of."""
    entered = {id(module)}
    for name in lists:
        steps = name.split(".") if name else []
        for end in range(1, len(steps) + 1):
            entered.add(id(module.get_submodule(".".join(steps[:end]))))
    return entered
