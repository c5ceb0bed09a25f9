"""The demo in small, and what it says when the two runs disagree."""

from __future__ import annotations

import math
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dreamcomm.tools.cli
from dreamcomm.tools.cli.commands import commands
from dreamcomm.tools.demo import run as demo_run
from dreamcomm.tools.demo.compare import BackendRun, compare, run_backend
from dreamcomm.tools.demo.model import GPT, Shape, parameter_count
from dreamcomm.tools.demo.report import closing_line, final_loss
from dreamcomm.tools.demo.text import Corpus, load_corpus, sample_batch
from dreamcomm.tools.demo.train import RankResult, Settings

SMALL = Settings(
    steps=40, batch=4, shape=Shape(context=32, layers=2, heads=2, width=32), timed_pairs=2
)


@dataclass
class Whole:
    """A demo from its first line to its last, which trains once on each backend."""

    agree: bool
    runs: list[BackendRun]
    lines: list[str]
    picture: Path


@pytest.fixture(scope="module")
def whole(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    picture = tmp_path_factory.mktemp("demo") / "demo.png"
    runs: list[BackendRun] = []

    def run_and_keep(name: str, ranks: int, settings: Settings) -> BackendRun:
        runs.append(run_backend(name, ranks, settings))
        return runs[-1]

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        patch.setenv("COLUMNS", "100")
        patch.setattr(demo_run, "run_backend", run_and_keep)
        agree = demo_run.run_demo(2, SMALL, picture, (backend, "gloo"))
    return Whole(agree, runs, said.getvalue().rstrip().splitlines(), picture)


@pytest.fixture(scope="module")
def runs(whole: Whole) -> tuple[BackendRun, BackendRun]:
    first, second = whole.runs
    return first, second


def test_both_backends_train_to_the_same_bits(runs: tuple[BackendRun, BackendRun]) -> None:
    found = compare(*runs)
    assert found.values == 2 * SMALL.steps
    assert found.equal, closing_line(*runs, found)


def test_the_loss_falls(runs: tuple[BackendRun, BackendRun]) -> None:
    losses = runs[0].losses()
    assert final_loss(runs[0]) < losses[0] - 1
    assert runs[0].validation_loss() < losses[0] - 1


def test_ranks_train_on_different_data(runs: tuple[BackendRun, BackendRun]) -> None:
    first, second = runs[0].ranks
    assert first.losses != second.losses
    assert first.weights_digest == second.weights_digest


def test_every_step_is_timed(runs: tuple[BackendRun, BackendRun]) -> None:
    for rank in runs[0].ranks:
        assert len(rank.step_times) == SMALL.steps
        assert len(rank.synced_times) == len(rank.unsynced_times) == SMALL.timed_pairs
        assert min(rank.step_times) > 0
    assert 0 <= runs[0].communication_share() < 1


def result(**changes: object) -> RankResult:
    plain = RankResult([2.0, 1.0], [0.1, 0.1], [0.1], [0.1], 1.0, "digest", 10)
    return replace(plain, **changes)  # type: ignore[arg-type]


def pair_of_runs(**changes: object) -> tuple[BackendRun, BackendRun]:
    """Two runs of two ranks, equal except for the last rank's ``changes``."""
    return (
        BackendRun("dreamcomm", [result(), result()]),
        BackendRun("gloo", [result(), result(**changes)]),
    )


def test_equal_runs_are_called_equal() -> None:
    runs = pair_of_runs()
    assert closing_line(*runs, compare(*runs)) == (
        "The losses of the two runs are equal: all 4 values, and the final weights, bit for bit."
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"losses": [2.0, 1.5]}, "NOT equal: 1 of 4 values differ, by 0.5 at most"),
        ({"losses": [2.0, math.nan]}, "NOT equal: 1 of 4 values differ"),
        ({"weights_digest": "another"}, "the final weights are not equal"),
    ],
)
def test_a_difference_is_told(changes: dict[str, object], text: str) -> None:
    runs = pair_of_runs(**changes)
    found = compare(*runs)
    assert not found.equal
    assert text in closing_line(*runs, found)


def test_the_communication_share_is_what_goes_with_the_exchange() -> None:
    run = BackendRun("gloo", [result(synced_times=[0.2, 0.2], unsynced_times=[0.15, 0.15])] * 2)
    assert run.communication_share() == pytest.approx(0.25)


def test_the_unigram_entropy_of_a_known_text() -> None:
    text = torch.tensor([1, 2, 3, 4])
    assert Corpus(text[:2], text[2:]).unigram_entropy() == pytest.approx(math.log(4))


def test_python_carries_enough_text() -> None:
    corpus = load_corpus()
    assert len(corpus.train) > 200_000
    assert 3 < corpus.unigram_entropy() < 3.6


def test_targets_are_the_tokens_one_byte_on() -> None:
    text = torch.arange(100)
    tokens, targets = sample_batch(text, 8, 16, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (8, 16)
    assert torch.equal(targets, tokens + 1)


def test_the_model_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = GPT(Shape(context=8, layers=2, heads=2, width=16))
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_the_model_of_the_demo_is_small() -> None:
    assert parameter_count(GPT(Shape())) <= 1_000_000


def test_the_whole_demo(whole: Whole) -> None:
    assert whole.agree
    assert whole.picture.read_bytes().startswith(b"\x89PNG")
    assert whole.lines[-1].startswith("The losses of the two runs are equal")
    assert str(whole.picture) in whole.lines[-2]
    assert any("unigram" in line for line in whole.lines)


def test_unequal_runs_end_with_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unequal = iter(pair_of_runs(losses=[2.0, 1.5]))
    monkeypatch.setattr(demo_run, "run_backend", lambda *_: next(unequal))
    done = CliRunner().invoke(commands, ["demo", "--out", str(tmp_path / "demo.png")])
    assert "NOT equal" in done.output
    assert done.exit_code == 1


def test_version_names_both_torches() -> None:
    done = CliRunner().invoke(commands, ["version"])
    assert done.exit_code == 0
    assert torch.__version__ in done.output
    assert "built against torch" in done.output


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        dreamcomm.tools.cli, "find_spec", lambda name: None if name == "rich" else True
    )
    with pytest.raises(SystemExit) as caught:
        dreamcomm.tools.cli.app()
    assert caught.value.code == ("The dreamcomm command needs rich: pip install 'dreamcomm[cli]'")
