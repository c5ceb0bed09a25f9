"""The costs that algorithms are chosen by: measured, kept, told, or fixed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dreamcomm
from helpers.pool import Fresh, Pool
from helpers.processes import RanksFailed

pytestmark = pytest.mark.beyond_gloo("gloo has one algorithm for each collective")


def told(costs: str = "auto") -> str:
    """Makes a group of its own, so that the option counts and not the environment."""
    import os

    os.environ["DREAMCOMM_COSTS"] = costs
    group = dist.new_group(backend="dreamcomm")
    data = torch.full((100_000,), float(dist.get_rank() + 1))
    dist.all_reduce(data, group=group)
    assert data.unique().tolist() == [dist.get_world_size() * (dist.get_world_size() + 1) / 2]
    text = dreamcomm.explain("all_reduce", 1 << 20, group=group)
    dist.destroy_process_group(group)
    return text


def times(text: str) -> dict[str, str]:
    return dict(re.findall(r"^ *\*? (\w+): ([\d.]+ us)", text, re.MULTILINE))


def test_fixed_costs_are_the_same_everywhere(fresh: Fresh) -> None:
    for text in fresh.run(told, "fixed"):
        assert "fixed ones" in text
        assert set(times(text)) == {"heap", "one_shot", "direct", "ring", "master"}


@pytest.mark.parametrize("world", [2, 3])
def test_costs_are_measured_once_and_kept(fresh: Fresh, tmp_path: Path, world: int) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    first = fresh.run(told, world=world, env=env)
    (kept,) = (tmp_path / "dreamcomm").iterdir()
    assert f"-{world}ranks-" in kept.name
    written = kept.read_text()
    second = fresh.run(told, world=world, env=env)
    assert kept.read_text() == written
    assert len({str(times(text)) for text in first + second}) == 1
    assert all(str(kept) in text for text in second)
    assert not [file for file in kept.parent.iterdir() if file != kept]


@pytest.mark.parametrize("content", ["", "nonsense", "dreamcomm-costs-3\nturn nan\n", "\0" * 999])
def test_a_spoilt_file_is_measured_anew(fresh: Fresh, tmp_path: Path, content: str) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    fresh.run(told, env=env)
    (kept,) = (tmp_path / "dreamcomm").iterdir()
    kept.write_text(content)
    fresh.run(told, env=env)
    assert kept.read_text().startswith("dreamcomm-costs-3\nturn ")
    assert kept.read_text() != content


def test_a_cache_that_cannot_be_written_is_done_without(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "dreamcomm").write_text("not a folder")
    texts = fresh.run(told, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert "could not be kept" in texts[0]
    assert (tmp_path / "dreamcomm").read_text() == "not a folder"


def test_a_file_of_costs_can_be_given(fresh: Fresh, tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    fresh.run(told, env=env)
    (kept,) = (tmp_path / "dreamcomm").iterdir()
    given = kept.rename(tmp_path / "given.txt")
    for text in fresh.run(told, str(given), env=env):
        assert str(given) in text
    assert not list((tmp_path / "dreamcomm").iterdir())


@pytest.mark.parametrize("costs", ["automatic", "/nowhere/costs.txt", "Fixed"])
def test_costs_that_are_no_file_are_refused(fresh: Fresh, costs: str) -> None:
    with pytest.raises(RanksFailed, match=r"expected costs to be auto, fixed or the path"):
        fresh.run(told, costs)


def test_an_empty_variable_says_nothing(fresh: Fresh, tmp_path: Path) -> None:
    for text in fresh.run(told, "", env={"XDG_CACHE_HOME": str(tmp_path)}):
        assert "fixed ones" not in text
    assert list((tmp_path / "dreamcomm").iterdir())


def test_the_choice_of_a_world_needs_no_group() -> None:
    text = dreamcomm.explain("all_reduce", 1 << 20, 2)
    assert "2 ranks of one host" in text
    assert "* one_shot" in text or "* direct" in text
    assert "* heap" in dreamcomm.explain("all_reduce", 1 << 20, 64, shared=True)
    assert "predicted time" in text
    assert re.search(r"kernels use (AVX-512|AVX2|SSE2|NEON|portable code)", text)


@pytest.mark.parametrize(("op", "world"), [("all_reduce", 0), ("all_reduce", -3), ("no_op", 2)])
def test_what_cannot_be_explained_is_refused(op: str, world: int) -> None:
    with pytest.raises(ValueError, match=r"unknown operation|at least 1 rank"):
        dreamcomm.explain(op, 1024, world)
    with pytest.raises(ValueError, match=r"expected nbytes from 0 to 2\*\*63 - 1"):
        dreamcomm.explain(op, 1 << 63, world)
    with pytest.raises(TypeError, match="expected nbytes to be an int, got '1KiB'"):
        dreamcomm.explain(op, "1KiB", world)  # type: ignore[arg-type]


def shapes() -> list[tuple[int, ...]]:
    return [
        tuple(dreamcomm.empty(2, 3).shape),
        tuple(dreamcomm.empty((2, 3)).shape),
        tuple(dreamcomm.zeros(torch.Size([4])).shape),
        tuple(dreamcomm.zeros(4).shape),
        tuple(dreamcomm.zeros(()).shape),
        tuple(dreamcomm.zeros().shape),
    ]


def test_shapes_are_numbers_or_one_sequence(pool: Pool) -> None:
    assert pool.run(shapes)[0] == [(2, 3), (2, 3), (4,), (4,), (), ()]
