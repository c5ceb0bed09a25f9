"""The benchmark from its first line to its last."""

from __future__ import annotations

import os
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from dreamcomm.launch import spawn
from dreamcomm.tools.bench import machine
from dreamcomm.tools.bench.busy import busy_processes
from dreamcomm.tools.bench.cases import Case, expand
from dreamcomm.tools.bench.flags import Flags, grids_of
from dreamcomm.tools.bench.gpus import check_gpus, device_of, on_gpus, options_for
from dreamcomm.tools.bench.measurement import console_of
from dreamcomm.tools.bench.outputs import check_output, write_json, written
from dreamcomm.tools.bench.plot import FORMATS, draw
from dreamcomm.tools.bench.ranks.rank import run_rank
from dreamcomm.tools.bench.report import WIDTH, print_run
from dreamcomm.tools.bench.result import CaseResult, Run, Settings, as_json

# torch's list names them as well: the fake one moves nothing.
NO_RIVALS = ("undefined", "dreamcomm", "fake")


def plan(
    flags: Flags,
    cases: Path | None,
    quick: bool,
    versus: str | None,
    outputs: tuple[Path | None, Path | None],
) -> list[Case]:
    """The cases to run; finds every mistake that can be found before the run, which takes minutes.

    Args:
        outputs: the paths of the JSON and of the picture.

    Raises:
        ValueError: something is wrong; the text is for the user.
    """
    if versus is not None:
        check_versus(versus)
    for path in outputs:
        check_output(path)
    if outputs[1] is not None and outputs[1].suffix not in FORMATS:
        raise ValueError(f"a picture ends in {', '.join(FORMATS)}, got {outputs[1].name}")
    launched = launched_world()
    grids = grids_of(flags, cases, quick, launched)
    if device_of(versus) == "cuda":
        grids = on_gpus(grids)
    listed = expand(grids)
    for case in listed:
        if launched is not None and case.world != launched:
            raise ValueError(
                f"a case asks for {case.world} ranks, but this process is one of {launched}"
            )
    if device_of(versus) == "cuda" and launched is None:
        check_gpus(listed)
    return listed


def run_and_show(
    cases: list[Case], settings: Settings, json_path: Path | None, plot_path: Path | None
) -> bool:
    """Runs the cases, prints the tables and writes the files; whether every result was right.

    Raises:
        RankError: a rank failed.
        BusyProcessError: a busy process did not run all the time.
        NotWrittenError: a file could not be written; the results have been printed.
    """
    run = run_bench(cases, settings)
    if launched_world() is None or os.environ["RANK"] == "0":
        console = console_of(WIDTH)
        print_run(console, run)
        if json_path is not None:
            with written(json_path):
                write_json(json_path, as_json(run), 1)
            console.print(f"Figures: {json_path}", highlight=False, soft_wrap=True)
        if plot_path is not None:
            with written(plot_path):
                is_drawn = draw(run, plot_path)
            if is_drawn:
                console.print(f"Picture: {plot_path}", highlight=False, soft_wrap=True)
    return not run.wrong()


def launched_world() -> int | None:
    """The world size if torchrun or the like started this process as one of its ranks.

    Raises:
        ValueError: the environment that it has set has no valid rank and world size.
    """
    if "RANK" not in os.environ:
        return None
    rank, world = os.environ["RANK"], os.environ.get("WORLD_SIZE", "")
    is_rank = rank.isdecimal() and world.isdecimal() and int(rank) < int(world)
    if not is_rank or not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ValueError(
            f"the environment says RANK={rank!r} and WORLD_SIZE={world!r}, which does not fit, or "
            "MASTER_ADDR or MASTER_PORT is missing: unset RANK, or start the ranks by torchrun"
        )
    return int(world)


def check_versus(versus: str) -> None:
    """Raises ValueError if there is no such backend to compare with here."""
    if versus == "dreamcomm":
        raise ValueError("dreamcomm is what is measured: name another backend")
    known = [*dist.Backend.backend_list]
    usable = [name for name in known if name not in NO_RIVALS and is_usable(name)]
    if versus not in usable:
        raise ValueError(
            f"the backend {versus!r} is not available in this torch {torch.__version__}: "
            f"choose from {', '.join(usable)}, none"
        )


def is_usable(backend: str) -> bool:
    """Whether a group of it can be made on this machine."""
    if backend == "nccl" and not torch.cuda.is_available():
        return False
    return bool(dist.is_backend_available(backend))


def run_bench(cases: list[Case], settings: Settings) -> Run:
    """Runs the cases: in this rank if it is one, else in one set of ranks per world size."""
    with busy_processes(busy_here(settings.beside)):
        run_all = run_spawned if launched_world() is None else run_launched
        results = run_all(cases, settings)
    return Run(
        machine.now(),
        machine.this_machine(),
        machine.these_versions(),
        machine.commit(),
        settings,
        tuple(results),
    )


def busy_here(asked: int) -> int:
    """The busy processes that this process starts: one rank of each machine starts them."""
    rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    return asked if launched_world() is None or rank == "0" else 0


def run_spawned(cases: list[Case], settings: Settings) -> list[CaseResult]:
    """Runs the cases in one set of ranks per world size."""
    results: list[CaseResult] = []
    for world, group in groupby(cases, key=lambda case: case.world):
        arguments = (list(group), settings)
        options = options_for(arguments[0], settings.versus)
        results += spawn(run_rank, world, args=arguments, options=options, start_method="spawn")[0]
    return results


def run_launched(cases: list[Case], settings: Settings) -> list[CaseResult]:
    """Runs the cases in this process, a rank already."""
    dist.init_process_group("dreamcomm", pg_options=options_for(cases, settings.versus))
    results = run_rank(cases, settings)
    dist.destroy_process_group()
    return results
