"""The list of commands."""

from __future__ import annotations

import typer

from dreamcomm.tools.cli.bench import bench
from dreamcomm.tools.cli.demo import demo
from dreamcomm.tools.cli.doctor import doctor
from dreamcomm.tools.cli.simulate import simulate
from dreamcomm.tools.cli.top import top
from dreamcomm.tools.cli.version import version

commands = typer.Typer(
    help="A communication backend for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
commands.command()(bench)
commands.command()(demo)
commands.command()(doctor)
commands.command()(simulate)
commands.command()(top)
commands.command()(version)
