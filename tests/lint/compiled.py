#!/usr/bin/env python3
"""Checks that what is compiled for one package of dreamcomm/ is used by that package alone.

    python tests/lint/compiled.py

import-linter cannot say it, as the compiled module is one. Types may be named anywhere: imports
under `if TYPE_CHECKING` do not count. Exit code 1 if another package uses a name.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "dreamcomm"

# The names of dreamcomm/_C.pyi that one package alone uses: buckets and their passes, the channels
# of messages, and the memory of parameters that a host has one copy of.
OWNERS = {
    "buckets": {
        "BackwardPass",
        "BucketSet",
        "OptimizerPass",
        "PassHooks",
        "ShardedGradients",
        "block_squares",
        "gather_rows",
        "pack",
        "rows_of_rank",
        "unpack",
    },
    "sync_batch_norm": {
        "batch_norm_input_gradient",
        "join_statistics",
        "statistics_row",
        "take_into_running",
    },
    "arrays": {"ArrayCalls"},
    "one_process": {
        "ThreadState",
        "add_in_order",
        "end_idle_threads",
        "rewind",
        "thread_generator",
    },
    "messages": {"HeaderChannel", "PlacedMessage"},
    "zero": {"Region", "RegionOffer", "any_of", "share_version", "step_rows", "take_region"},
}


def compiled_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names of the compiled module that a file uses, with their lines.

    They are attributes of `_C` after `from dreamcomm import _C`, and imports from dreamcomm._C.
    """
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "_C":
            yield node.lineno, node.attr
        if isinstance(node, ast.ImportFrom) and node.module == "dreamcomm._C":
            names = () if id(node) in typing_only else node.names
            yield from ((node.lineno, one.name) for one in names)


def wrong_uses() -> Iterator[str]:
    """A line for each use of a name outside of its package."""
    owner_of = {name: owner for owner, names in OWNERS.items() for name in names}
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        for line, name in compiled_names(ast.parse(path.read_text())):
            owner = owner_of.get(name)
            if owner is not None and place.parts[0] != owner:
                yield f"dreamcomm/{place}:{line}: _C.{name} is for dreamcomm/{owner} alone"


def main() -> int:
    """Prints the uses outside of a name's package."""
    there = set(re.findall(r"^(?:class|def) (\w+)", (ROOT / "_C.pyi").read_text(), re.MULTILINE))
    gone = sorted(set().union(*OWNERS.values()) - there)
    if gone:
        sys.exit(f"dreamcomm/_C.pyi has no {', '.join(gone)}: mend the table here")
    found = list(wrong_uses())
    for line in found:
        print(line)
    print(f"{len(found)} uses of another package's compiled names")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
