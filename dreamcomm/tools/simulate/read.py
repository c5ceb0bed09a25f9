"""Reads a cluster from a TOML file."""

from __future__ import annotations

import sys
from pathlib import Path

from dreamcomm.tools.simulate.cluster import Cluster, described

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_cluster(path: Path) -> Cluster:
    """Raises ValueError if it is no TOML or describes no cluster, OSError if it cannot be read."""
    try:
        return described(tomllib.loads(path.read_text(encoding="utf-8")))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text, as TOML is: see byte {error.start}, or save it as UTF-8"
        ) from None
    except RecursionError:
        raise ValueError(f"{path} is no TOML of a cluster: it is nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
