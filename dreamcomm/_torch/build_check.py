"""Says in one line why the compiled module cannot run here, before it is loaded.

Call `check_build()` before the first `from dreamcomm import _C`: torch's C++ classes
differ from one minor version to the next, and the loader would only report an
undefined symbol, or crash later.
"""

from __future__ import annotations

from pathlib import Path


def minor_version(version: str) -> str:
    """The part that has to be equal: "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])


def check_torch(built: str, running: str) -> None:
    """Raises ImportError if torch `running` is not the minor version of the build."""
    if minor_version(built) == minor_version(running):
        return
    raise ImportError(
        f"dreamcomm was built for torch {built} but torch {running} is installed: reinstall "
        "dreamcomm from its source (pip install --force-reinstall --no-deps .) or install "
        f"torch {minor_version(built)}"
    )


def check_build() -> None:
    """Raises ImportError unless the compiled module is there and fits the running torch."""
    import torch

    try:
        from dreamcomm._build_info import TORCH_VERSION
    except ModuleNotFoundError:
        raise ImportError(
            f"dreamcomm is not built in {Path(__file__).parents[1]}: run `pip install .` in its "
            "source folder, and start Python in another folder"
        ) from None
    if not hasattr(torch, "__version__"):
        found = getattr(torch, "__file__", None) or next(iter(torch.__path__))
        raise ImportError(
            f"the first torch that Python finds is not PyTorch: {found}; rename it, or start "
            "Python where it does not stand before PyTorch"
        )
    check_torch(TORCH_VERSION, torch.__version__)
