"""The schedules' lengths, bubbles and activations are those of their papers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from dreamcomm.pipeline.schedule import (
    Action,
    Deadlock,
    Kind,
    Schedule,
    Simulation,
    check,
    gpipe,
    interleaved_1f1b,
    live_bound,
    make_schedule,
    one_f_one_b,
    simulate,
    with_messages,
    zero_bubble_h1,
)

RANKS = range(1, 9)
MICROBATCHES = range(1, 34)


def assert_runs(schedule: Schedule, length: int, live: list[int] | None = None) -> Simulation:
    """The schedule passes the check, and takes this time with and without messages."""
    check(schedule, max_live=live)
    run = simulate(schedule)
    assert run.length == length
    bounds = tuple(live_bound(schedule, stage) for stage in range(schedule.stages))
    assert run.live_peak == bounds
    if live is not None:
        assert all(peak <= most for peak, most in zip(run.live_peak, live, strict=True))
    if schedule.microbatches <= schedule.world + 1 or schedule.microbatches >= 32:
        lowered = with_messages(schedule)
        check(lowered, max_live=live)
        assert simulate(lowered).length == length
    return run


@pytest.mark.parametrize("k", RANKS)
def test_gpipe(k: int) -> None:
    for m in MICROBATCHES:
        run = assert_runs(gpipe(k, m), (m + k - 1) * 3, [m] * k)
        assert run.bubble == (k - 1) / (m + k - 1)


@pytest.mark.parametrize("k", RANKS)
def test_1f1b(k: int) -> None:
    for m in MICROBATCHES:
        live = [min(m, k - s) for s in range(k)]
        run = assert_runs(one_f_one_b(k, m), (m + k - 1) * 3, live)
        assert run.bubble == (k - 1) / (m + k - 1)


@pytest.mark.parametrize("k", RANKS)
def test_zero_bubble_h1(k: int) -> None:
    for m in MICROBATCHES:
        length = max(3 * m + k - 1, 2 * m + 2 * k - 1)
        assert_runs(zero_bubble_h1(k, m), length, [min(m, k - s) for s in range(k)])


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("k", RANKS)
def test_interleaved_1f1b(k: int, v: int) -> None:
    """The paper's share for multiples of K, and the shortest length for every other number."""
    for m in MICROBATCHES if k in (2, 3) else {1, 2, 4, k - 1, k, k + 1, 2 * k - 1, 32} - {0}:
        run = assert_runs(interleaved_1f1b(k, m, v * k), 3 * (v * max(m, k) + min(m, k) - 1))
        if m >= k:
            assert run.bubble == (k - 1) / (v * m + k - 1)


@pytest.mark.parametrize("k", RANKS)
def test_breadth_first(k: int) -> None:
    for m in (1, 2, k, k + 1, 32):
        schedule = gpipe(k, m, 2 * k)
        assert_runs(schedule, 3 * (2 * max(m, k) + min(m, k) - 1), [m] * (2 * k))


def test_gpipe_speeds_up_as_the_paper_says() -> None:
    for k, least in ((2, 1.8), (4, 3.4), (8, 6.3)):
        speedup = Fraction(k * 32, 32 + k - 1)
        assert simulate(gpipe(k, 32)).length * speedup == k * 32 * 3
        assert speedup >= least


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("GPipe", "GPipe"),
        ("gpipe", "GPipe"),
        ("1f1b", "1F1B"),
        ("INTERLEAVED1F1B", "Interleaved1F1B"),
        ("zb-h1", "ZB-H1"),
        ("ZBH1", "ZB-H1"),
        ("ZeroBubbleH1", "ZB-H1"),
    ],
)
def test_names(name: str, made: str) -> None:
    assert make_schedule(name, 2, 2, 3).name == made


def test_gpipe_with_several_stages_a_rank_is_breadth_first() -> None:
    schedule = make_schedule("gpipe", 2, 4, 2)
    assert schedule.name == "LoopedBFS"
    assert " ".join(map(str, schedule.actions(0))) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
    assert schedule == make_schedule("LoopedBFS", 2, 4, 2)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("2f2b", (2, 2, 2), "GPipe, 1F1B, Interleaved1F1B, ZB-H1"),
        ("1f1b", (2, 4, 2), "use Interleaved1F1B"),
        ("zb-h1", (2, 4, 2), "use Interleaved1F1B"),
        ("gpipe", (2, 3, 2), "multiple of the number of ranks"),
        ("interleaved1f1b", (2, 3, 2), "multiple of the number of ranks"),
        ("gpipe", (0, 0, 2), "at least one rank"),
        ("1f1b", (2, 2, 0), "at least one micro-batch"),
    ],
)
def test_sizes_that_no_schedule_has_are_refused(
    name: str, sizes: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(name, *sizes)


@pytest.mark.parametrize("text", ["0F0", "12SEND_F1", "2RECV_B30", "3UNSHARD", "1REDUCE_GRAD"])
def test_actions_are_written_as_they_are_read(text: str) -> None:
    assert str(Action.parse(f" {text} ")) == text


def test_an_action_of_several_parts() -> None:
    action = Action.parse("(0F3;7B1)OVERLAP_F_B")
    assert action.parts == (Action(0, Kind.F, 3), Action(7, Kind.B, 1))
    assert str(action) == "(0F3;7B1)OVERLAP_F_B"


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0X0", "0F0x", "0UNSHARD1", "0OVERLAP_F_B", "(0F0)B", "(0F0;)F", "()"]
)
def test_other_texts_are_no_actions(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


def test_messages_follow_their_sends_and_precede_their_computes() -> None:
    schedule = with_messages(one_f_one_b(2, 2))
    assert " ".join(map(str, schedule.actions(0))) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    )
    assert " ".join(map(str, schedule.actions(1))) == (
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )


def test_messages_are_received_in_the_order_of_their_sends() -> None:
    """Here rank 1 needs the second one first."""
    rows = ("0F0 0F1", "1F1 1F0")
    ranks = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    schedule = with_messages(Schedule("crossed", 2, 2, ranks, (0, 1)))
    check(schedule)
    assert " ".join(map(str, schedule.actions(1))) == "1RECV_F0 1RECV_F1 1F1 1F0"


def test_a_schedule_with_messages_gets_no_others() -> None:
    with pytest.raises(ValueError, match="has messages already"):
        with_messages(with_messages(gpipe(2, 1)))


def test_a_schedule_without_a_needed_compute_gets_no_messages() -> None:
    schedule = Schedule("broken", 2, 1, ((), (Action(1, Kind.F, 0),)), (0, 1))
    with pytest.raises(ValueError, match="1F0 needs 1RECV_F0"):
        with_messages(schedule)


def test_costs() -> None:
    """Numbers for each stage, functions of the step, and a time for each message."""
    schedule = one_f_one_b(2, 1)

    # F on 0: 3, message: 1, F on 1: 5, B on 1: 2 + 2, message: 1, B on 0: 2 + 2.
    def weight(action: Action) -> int:
        return 2

    def run_of(schedule: Schedule) -> Simulation:
        return simulate(
            schedule, forward=[3, 5], backward_input=2, backward_weight=weight, message=1
        )

    run = run_of(schedule)
    assert run.length == 18
    assert run.busy == (7, 9)
    assert run.bubble == 1 - 16 / 36
    assert run_of(with_messages(schedule)).length == 18
    assert simulate(schedule, forward=Fraction(1, 3)).length == Fraction(14, 3)


def test_costs_that_are_refused() -> None:
    with pytest.raises(ValueError, match="3 costs for 2 stages"):
        simulate(gpipe(2, 1), forward=[1, 2, 3])
    with pytest.raises(ValueError, match="negative"):
        simulate(gpipe(2, 1), message=-1)


def test_a_deadlock_says_what_each_rank_waits_for() -> None:
    rows = ((Action(0, Kind.B, 0), Action(0, Kind.F, 0)), (Action(1, Kind.F, 0),))
    with pytest.raises(Deadlock) as caught:
        simulate(Schedule("stuck", 2, 1, rows, (0, 1)))
    assert caught.value.waits[0] == "0B0 for 0F0"
    assert "rank 1 waits in 1F0 for 0F0" in str(caught.value)
