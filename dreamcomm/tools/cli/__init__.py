"""The ``dreamcomm`` command. One file per command; ``app`` is the script's entry."""

from __future__ import annotations

import sys
from importlib.util import find_spec

# The packages that the extra "cli" installs.
NEEDED = ("typer", "rich", "matplotlib")


def app() -> None:
    """Runs the command line, or says in one line what to install first."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"The dreamcomm command needs {' and '.join(missing)}: pip install 'dreamcomm[cli]'"
        )
    from dreamcomm.tools.cli.commands import commands
    from dreamcomm.tools.cli.output import told_output

    with told_output():
        commands()
