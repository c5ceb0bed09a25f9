"""What the benchmark measures, verifies and computes, without a run of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dreamcomm.tools.bench.casefile import read_cases
from dreamcomm.tools.bench.cases import BURST_BYTES, ITEM_BYTES, Case, Grid, expand, fit
from dreamcomm.tools.bench.flags import Flags, grids_of
from dreamcomm.tools.bench.operations import OPERATIONS, ResultPiece, result_pieces
from dreamcomm.tools.bench.ranks.buffers import make_buffers
from dreamcomm.tools.bench.ranks.timing import (
    FEWEST_SAMPLES,
    MOST_SAMPLES,
    measure,
    play,
    sample_count,
)
from dreamcomm.tools.bench.ranks.verify import (
    CHUNK,
    RandomInputs,
    fill,
    find_error,
    rewritten_inputs,
)
from dreamcomm.tools.bench.report import format_time
from dreamcomm.tools.bench.room import shortage
from dreamcomm.tools.bench.sizes import format_size, parse_size, steps
from dreamcomm.tools.bench.statistics import across_ranks, bandwidths, percentile, summarize

CASE = Case("all_reduce", "float32", 1024, 2, "private", True, ("dist", "core"))
CASES_FILE = Path(__file__).parents[2] / "benchmarks" / "cases.toml"


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("1KiB", 1024), ("32k", 32768), ("1 MB", 1 << 20), ("2GiB", 2 << 30), ("3B", 3)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "KiB", "0", "-1", "1.5MiB", "1TiB", "1 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("size", [1, 1020, 1024, 1536, 1 << 20, 3 << 30])
def test_a_written_size_reads_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_steps_go_up_to_the_largest() -> None:
    assert steps(1, 64, 4) == (1, 4, 16, 64)
    assert steps(1, 63, 4) == (1, 4, 16)
    with pytest.raises(ValueError, match="above the largest"):
        steps(2, 1, 4)
    with pytest.raises(ValueError, match="2 or more"):
        steps(1, 2, 1)


def test_cases_are_all_combinations_by_world() -> None:
    grid = Grid(("all_reduce", "broadcast"), (1024, 4096), ("float32", "int8"), (4, 2))
    cases = expand([grid])
    assert len(cases) == len(set(cases)) == 2 * 2 * 2 * 2 * 2
    assert [case.world for case in cases] == [2] * 16 + [4] * 16
    assert expand([grid, grid]) == cases


def test_a_barrier_is_one_case_without_size() -> None:
    (case,) = expand([Grid(("barrier",), (1024, 4096), ("float32", "int8"))])
    assert (case.bytes, case.placement, case.layers) == (0, "private", ("dist",))


def test_in_place_holds_where_an_operation_can() -> None:
    ops = ("all_reduce", "all_gather", "all_to_all")
    asked = {case.op: case for case in expand([Grid(ops, (1024,), in_place=True)])}
    assert [asked[op].in_place for op in ops] == [True, True, False]
    assert asked["all_gather"].layers == ("dist",)
    usual = {case.op: case.in_place for case in expand([Grid(ops, (1024,))])}
    assert [usual[op] for op in ops] == [True, False, False]


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to measure"):
        expand([Grid(("barrier",), (1024,), layers=("core",))])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ops": ("all_reduse",)}, "unknown operation 'all_reduse': choose from all_reduce, "),
        ({"dtypes": ("float8",)}, "unknown dtype 'float8': choose from float32, bfloat16, "),
        ({"placements": ("gpu",)}, "unknown placement 'gpu': choose from private, heap"),
        ({"layers": ("c",)}, "unknown layer 'c': choose from dist, core"),
        ({"worlds": (0,)}, "a world has 1 to 16 ranks, got 0"),
    ],
)
def test_unknown_words_name_what_is_allowed(change: dict[str, Any], text: str) -> None:
    fields = {"ops": ("all_reduce",), "sizes": (1024,)} | change
    with pytest.raises(ValueError, match=r"unknown|ranks") as caught:
        Grid(**fields)
    assert text in str(caught.value)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_every_size_has_equal_parts(world: int, dtype: str) -> None:
    for size in (1, 1024, 1 << 20):
        fitted = fit(size, dtype, world)
        assert fitted % (world * ITEM_BYTES[dtype]) == 0
        assert fitted % (world * 4) == 0
        assert 0 < fitted <= max(size, world * 8)


def test_bursts_are_short_for_large_tensors() -> None:
    bursts = {size: replace(CASE, bytes=size).burst for size in (4, 32 << 10, 600 << 10, 1 << 28)}
    assert bursts == {4: 64, 32 << 10: BURST_BYTES // (32 << 10), 600 << 10: 1, 1 << 28: 1}


def test_bus_factors_are_those_of_nccl_tests() -> None:
    factors = {name: operation.bus(4) for name, operation in OPERATIONS.items()}
    assert factors == {
        "all_reduce": 1.5,
        "reduce_scatter": 0.75,
        "all_gather": 0.75,
        "all_to_all": 0.75,
        "broadcast": 1,
        "reduce": 1,
        "barrier": 1,
    }
    assert bandwidths("all_gather", 4_000_000_000, 4, 2.0) == (2.0, 1.5)


def test_percentiles_are_measured_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 50) == 50
    assert percentile(values, 99) == 99
    assert percentile(values, 100) == 100
    assert percentile([3.0], 50) == percentile([3.0], 99) == 3.0


def test_the_time_of_a_call_is_the_average_of_its_ranks() -> None:
    assert across_ranks([[1.0, 5.0], [2.0, 3.0]]) == [1.5, 4.0]


def test_the_fraction_of_the_ceiling() -> None:
    durations = {"core": [4.0] * 3, "ceiling": [1.0, 2.0, 3.0]}
    timings = summarize("broadcast", 8_000_000_000, 2, durations, "ceiling")
    assert timings["core"].of_ceiling == 0.5
    assert timings["core"].algbw == timings["core"].busbw == 2.0
    assert summarize("broadcast", 8, 2, {"core": [4.0]}, "ceiling")["core"].of_ceiling is None


def test_times_are_written_with_three_digits() -> None:
    times = {1.7e-6: "1.70 µs", 12.34e-6: "12.3 µs", 9.9996e-4: "1.00 ms", 0.195: "195 ms"}
    assert {seconds: format_time(seconds) for seconds in times} == times
    assert format_time(4e-7) == "400 ns"


class Turn:
    """A variant that writes down when it is called."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name, self.diary = name, diary

    def sample(self) -> list[float]:
        self.diary.append(self.name)
        return [1.0, 2.0]


def test_variants_take_turns_in_rotating_order() -> None:
    diary: list[str] = []
    variants = [Turn(name, diary) for name in "abc"]
    for turn in range(4):
        play(variants, turn)
    assert "".join(diary) == "abcbcacababc"


def test_all_ranks_take_as_many_samples_as_rank_0() -> None:
    diary: list[str] = []
    found = measure([Turn("a", diary), Turn("b", diary)], 1.0, lambda _: 7)
    assert found == {"a": [1.0, 2.0] * 7, "b": [1.0, 2.0] * 7}
    assert len(diary) == 2 * (2 + 7)


def test_samples_fit_the_budget_within_bounds() -> None:
    counts = [sample_count(seconds, 1.0) for seconds in (10.0, 0.1, 1e-6)]
    assert counts == [FEWEST_SAMPLES, 10, MOST_SAMPLES]


def test_a_case_too_large_for_the_memory_says_how_much_it_needs() -> None:
    case = replace(CASE, bytes=64 << 20)
    assert shortage(case, 384 << 20) is None
    assert shortage(case, 383 << 20) == "needs about 384 MiB, 383 MiB are available"


def test_flags_have_defaults() -> None:
    (grid,) = grids_of(Flags(), None, False, None)
    assert grid.ops == tuple(OPERATIONS)
    assert (grid.sizes[0], grid.sizes[-1]) == (1 << 10, 256 << 20)
    assert grid.worlds == (2,)
    assert grids_of(Flags(), None, False, 5)[0].worlds == (5,)


def test_flags_contradict() -> None:
    with pytest.raises(ValueError, match="not both"):
        grids_of(Flags(sizes="1KiB", least="1KiB"), None, False, None)
    with pytest.raises(ValueError, match="not both"):
        grids_of(Flags(ops=("all_reduce",)), CASES_FILE, False, None)


def test_the_table_of_the_full_run_is_read() -> None:
    cases = expand(read_cases(CASES_FILE))
    assert {case.world for case in cases} == {2, 4}
    assert Case("all_reduce", "bfloat16", 64 << 20, 2, "heap", True, ("dist", "core")) in cases
    largest = [case for case in cases if case.bytes == 256 << 20]
    assert [case.placement for case in largest] == ["private", "heap"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cases = 3", "expected tables [[cases]]"),
        ("cases = []", "there is no table [[cases]]"),
        ("cases = [1]", "[[cases]] number 1: expected a table, got 1"),
        ("[[cases]]\nop = []\nsize = '1KiB'", "op is an empty list"),
        ("[[cases]]\nop = 'all_reduce'", "[[cases]] number 1: the key 'size' is missing"),
        ("[[cases]]\nop = 'x'\nsize = '1KiB'", "number 1: unknown operation 'x'"),
        ("[[cases]]\nsizes = []", "unknown key 'sizes': choose from op, size"),
        ("[[cases]]\nop = 'reduce'\nsize = 1", "size holds 1, expected str"),
        ("[[cases]", "cases.toml: "),
    ],
)
def test_a_bad_file_of_cases_is_explained(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"cases\.toml") as caught:
        read_cases(path)
    assert words in str(caught.value)


def test_results_are_made_of_pieces() -> None:
    assert result_pieces("all_reduce", 1, 2, 8) == [ResultPiece((0, 1), 0, 8)]
    assert result_pieces("reduce_scatter", 1, 2, 8) == [ResultPiece((0, 1), 4, 4)]
    assert result_pieces("all_gather", 0, 2, 8) == [
        ResultPiece((0,), 0, 4),
        ResultPiece((1,), 0, 4),
    ]
    assert result_pieces("all_to_all", 1, 2, 8) == [
        ResultPiece((0,), 4, 4),
        ResultPiece((1,), 4, 4),
    ]
    assert result_pieces("broadcast", 1, 2, 8) == [ResultPiece((0,), 0, 8)]
    assert result_pieces("reduce", 0, 2, 8) == [ResultPiece((0, 1), 0, 8)]
    assert result_pieces("reduce", 1, 2, 8) == []


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_verification_finds_one_wrong_element(dtype: str) -> None:
    length = CHUNK + 10
    source = RandomInputs(2, signed=dtype != "uint8")
    inputs = torch.empty(2, 2, length, dtype=getattr(torch, dtype))
    for rank in range(2):
        fill(inputs[rank], rank, source)
    total = inputs[0] + inputs[1]
    assert find_error("all_reduce", 1, 2, length, total, source) is None
    right = total[1, CHUNK + 5].item()
    total[1, CHUNK + 5] += 1
    assert find_error("all_reduce", 1, 2, length, total, source) == (
        f"rank 1, call 1, element {CHUNK + 5}: expected {right}, got {right + 1}"
    )


def test_verification_finds_blocks_in_the_wrong_order() -> None:
    case = replace(CASE, op="all_gather", in_place=False)
    gathered = torch.cat([torch.full((1, 128), 1.0), torch.full((1, 128), 2.0)], dim=1)
    assert find_error("all_gather", 0, 2, case.total, gathered, rewritten_inputs) is None
    swapped = gathered.flip(1)
    assert find_error("all_gather", 0, 2, case.total, swapped, rewritten_inputs) == (
        "rank 0, call 0, element 0: expected 1.0, got 2.0"
    )


@pytest.mark.parametrize("op", [name for name in OPERATIONS if name != "barrier"])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_buffer_is_rewritten(op: str, in_place: bool) -> None:
    (case,) = expand([Grid((op,), (1024,), placements=("private",), in_place=in_place)])

    def zeros(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows, columns), 9, dtype=dtype)

    buffers = make_buffers(case, 1, zeros, case.in_slice)
    operation = OPERATIONS[op]
    assert buffers.input.shape == (case.burst, operation.input_length(256, 2))
    assert buffers.output.shape == (case.burst, operation.output_length(256, 2))
    memory = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in (buffers.input, buffers.output)
    }
    assert sum(storage.nbytes() for storage in memory.values()) == case.tensor_bytes()
    buffers.rewrite()
    assert bool((buffers.input == 2).all())
    assert not bool((buffers.output == 9).any())
