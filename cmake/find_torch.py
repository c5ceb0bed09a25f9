"""Prints the folder of the torch that the running interpreter would import, or nothing.

torch is not imported: that takes seconds. In pip's isolated build the environment's
packages are off sys.path, but the interpreter is still the environment's own, so its
site folders are where the package is about to be installed.
"""

from __future__ import annotations

import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def candidates() -> Iterator[Path]:
    """Folders that may hold torch, in the order of sys.path outside of the isolation."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    folders += site.getsitepackages()
    if sys.prefix == sys.base_prefix:  # a virtual environment does not see the user's own
        folders.insert(0, site.getusersitepackages())
    yield from (Path(folder, "torch") for folder in folders)


def main() -> None:
    """Prints the first candidate that is a whole torch."""
    for folder in candidates():
        if (folder / "version.py").is_file() and (folder / "include").is_dir():
            print(folder)
            return


if __name__ == "__main__":
    main()
