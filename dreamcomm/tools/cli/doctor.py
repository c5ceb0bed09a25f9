"""``dreamcomm doctor``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

if TYPE_CHECKING:
    from dreamcomm.tools.doctor import Finding

Json = Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")]

STYLES = {"fine": "green", "note": "cyan", "falls back": "yellow", "broken": "bold red"}


def doctor(as_json: Json = False) -> None:
    """Checks the installation and the machine, and says what falls back, and why.

    Started by torchrun (--no-python) it also shows which ranks of the job share memory.

    Ends with exit code 1 if something is broken. Fallbacks work, but slower.
    """
    from dreamcomm.tools.doctor import Severity, examine

    console = Console(highlight=False)
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            show(console, finding)
    if as_json and findings:  # most ranks of a job look at nothing themselves
        typer.echo(json.dumps([finding.as_dict() for finding in findings], indent=2))
    if any(finding.state is Severity.BROKEN for finding in findings):
        raise typer.Exit(1)


def show(console: Console, finding: Finding) -> None:
    """A line, and below it what follows."""
    state = finding.state.value
    console.print(f"[{STYLES[state]}]{state:>10}[/]  {finding.about}: ", end="")
    console.print(finding.found, markup=False)
    if finding.meaning:
        console.print(Padding(Text(finding.meaning), (0, 0, 0, 12)))
