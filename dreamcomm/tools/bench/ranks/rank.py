"""The work of every rank: for each case verify, then time, then combine the ranks' times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dreamcomm.info import transport
from dreamcomm.tools.bench.progress import CaseBar
from dreamcomm.tools.bench.ranks.team import Team
from dreamcomm.tools.bench.ranks.timing import measure
from dreamcomm.tools.bench.ranks.variants import CEILING, CORE, DREAMCOMM, Variant, line_up
from dreamcomm.tools.bench.result import CaseResult, Prediction, Settings
from dreamcomm.tools.bench.room import shortage
from dreamcomm.tools.bench.statistics import Timing, across_ranks, summarize

if TYPE_CHECKING:
    from dreamcomm.tools.bench.cases import Case


def run_rank(cases: list[Case], settings: Settings) -> list[CaseResult]:
    """Runs the cases in this rank of the default group; every rank returns the same results."""
    torch.set_num_threads(1)
    team = Team(settings.versus)
    why_not = team.not_carried()
    if why_not is not None:
        words = f"dreamcomm's kernels do not carry tensors on GPUs here: {why_not}"
        return [skipped(case, words) for case in cases]
    # Read once: later, memory that is kept for the next case would count as used.
    available: int = team.from_first(team.available())
    results = []
    with CaseBar(team.world, len(cases), show=team.rank == 0) as bar:
        for case in cases:
            bar.begin(case)
            lack = shortage(case, available)
            result = run_case(case, team, settings) if lack is None else skipped(case, lack)
            results.append(result)
            bar.end()
    return results


def skipped(case: Case, why: str) -> CaseResult:
    """The result of a case that could not be measured here."""
    return CaseResult(case, "skipped", (why,))


def run_case(case: Case, team: Team, settings: Settings) -> CaseResult:
    """Measures one case, unless a result is wrong."""
    variants: list[Variant] = []
    full = None
    try:
        variants = line_up(case, team)
    except MemoryError as error:
        full = str(error)
    if (problem := team.first_problem(full)) is not None:
        return skipped(case, problem)
    notes: list[str] = []
    for variant in list(variants):
        lack, problem = verify(variant, team)
        if lack is None and problem is None:
            continue
        if variant.name == DREAMCOMM or (lack is None and variant.name != team.versus):
            return CaseResult(case, "wrong", (f"{variant.name}: {lack or problem}",))
        notes.append(f"{variant.name} was left out: {lack or problem}")
        variants.remove(variant)
    by_rank = team.gather(measure(variants, settings.seconds, team.from_first))
    durations = {name: across_ranks([times[name] for times in by_rank]) for name in by_rank[0]}
    timings = summarize(case.op, case.bytes, case.world, durations, CEILING)
    return CaseResult(case, "measured", tuple(notes), timings, predict(case, team, timings))


def verify(variant: Variant, team: Team) -> tuple[str | None, str | None]:
    """The reason that the variant cannot run on some rank, and the error in some rank's results.

    The other backend may lack a call; core and ceiling may lack memory that ranks share.
    """
    lack = problem = None
    allowed = (RuntimeError, TypeError) if variant.name == team.versus else ()
    try:
        problem = variant.error()
    except (ValueError, *allowed) as error:
        if variant.name == DREAMCOMM:
            raise
        lack = str(error).splitlines()[0]
    return team.first_problem(lack), team.first_problem(problem)


def predict(case: Case, team: Team, timings: dict[str, Timing]) -> Prediction | None:
    """Compares the cost model with the bare core, or with the call if only that ran."""
    if case.op == "barrier" or team.device != "cpu" or not transport(team.dream).startswith("shm"):
        return None
    in_heap = case.placement == "heap"
    algorithm, seconds = team.backend._predict(case.op, case.bytes, in_heap)
    of = CORE if CORE in timings else DREAMCOMM
    return Prediction(algorithm, seconds, of, seconds / timings[of].p50 - 1)
