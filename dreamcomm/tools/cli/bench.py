"""``dreamcomm bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dreamcomm.tools.bench.flags import Flags
    from dreamcomm.tools.bench.result import Settings

SECONDS, QUICK_SECONDS = 1.0, 0.2
NO_BACKEND = "none"

Many = list[str] | None
Ops = Annotated[Many, typer.Option("--op", help="A collective; repeatable.", show_default="all")]
Least = Annotated[str | None, typer.Option("--min", help="Smallest size.", show_default="1KiB")]
Most = Annotated[str | None, typer.Option("--max", help="Largest size.", show_default="256MiB")]
Factor = Annotated[int | None, typer.Option(help="Between two sizes.", show_default="4")]
Sizes = Annotated[str | None, typer.Option(help="Instead of these: a list, as 1KiB,32KiB.")]
Dtypes = Annotated[
    Many, typer.Option("--dtype", help="Type of the tensors; repeatable.", show_default="float32")
]
Worlds = Annotated[
    list[int] | None,
    typer.Option("--world", help="Number of ranks; repeatable.", show_default="2, or torchrun's"),
]
Placements = Annotated[
    Many,
    typer.Option("--placement", help="private or heap tensors; repeatable.", show_default="both"),
]
Layers = Annotated[
    Many,
    typer.Option(
        "--layer", help="dist (through torch) or core (bare C++); repeatable.", show_default="both"
    ),
]
InPlace = Annotated[
    bool | None,
    typer.Option(
        "--in-place/--out-of-place",
        help="For all_gather and reduce_scatter; the others run in one way only.",
        show_default="out of place",
    ),
]
Versus = Annotated[str, typer.Option(help="A torch backend to take turns with, or none.")]
Beside = Annotated[
    int,
    typer.Option(min=0, max=256, help="Busy processes that run beside the ranks of each machine."),
]
Seconds = Annotated[
    float | None,
    typer.Option(min=0.001, max=3600, help="Time for one case, about.", show_default="1.0"),
]
Cases = Annotated[
    Path | None,
    typer.Option(help="A TOML file of cases, instead of flags.", exists=True, dir_okay=False),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw here (png, svg or pdf).")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer cases, a run of seconds.")]


def bench(
    ops: Ops = None,
    least: Least = None,
    most: Most = None,
    factor: Factor = None,
    sizes: Sizes = None,
    dtypes: Dtypes = None,
    worlds: Worlds = None,
    placements: Placements = None,
    layers: Layers = None,
    in_place: InPlace = None,
    versus: Versus = "gloo",
    beside: Beside = 0,
    seconds: Seconds = None,
    cases: Cases = None,
    json_path: Json = None,
    plot_path: Plot = None,
    quick: Quick = False,
) -> None:
    """Times the collectives beside another backend and beside a ceiling measured in the same run.

    Results are verified before they are timed; ends with exit code 1 if one is wrong.
    """
    from dreamcomm.tools.bench.flags import Flags
    from dreamcomm.tools.bench.result import Settings

    asked = Flags(
        tuple(ops or ()), least, most, factor, sizes, tuple(dtypes or ()), tuple(worlds or ()),
        tuple(placements or ()), tuple(layers or ()), in_place,
    )  # fmt: skip
    settings = Settings(
        seconds or (QUICK_SECONDS if quick else SECONDS),
        None if versus == NO_BACKEND else versus,
        beside,
    )
    run(asked, cases, quick, settings, json_path, plot_path)


def run(
    flags: Flags,
    cases: Path | None,
    quick: bool,
    settings: Settings,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Plans and runs; errors become the command's messages and exit codes."""
    from dreamcomm.launch import RankError
    from dreamcomm.tools.bench.busy import BusyProcessError
    from dreamcomm.tools.bench.outputs import NotWrittenError
    from dreamcomm.tools.bench.run import plan, run_and_show

    try:
        listed = plan(flags, cases, quick, settings.versus, (json_path, plot_path))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        right = run_and_show(listed, settings, json_path, plot_path)
    except (RankError, BusyProcessError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except NotWrittenError as error:
        sys.exit(f"dreamcomm: {error}")
    if not right:
        raise typer.Exit(1)
