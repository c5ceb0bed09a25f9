"""Random programs of collectives agree with NumPy, bit for bit, on every rank."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from collectives import bits
from collectives.executor import run_plan
from collectives.plan import KINDS, LAYOUTS, REDUCING, Plan, Step
from helpers.pool import Pool

COUNTS = (0, 1, 2, 3, 7, 64, 1000, 4097, 70_001)


class Abilities:
    """What a backend is asked: all, or what the stand-in gloo can do."""

    def __init__(self, backend: str) -> None:
        gloo = backend == "gloo"
        self.kinds = tuple(
            k for k in KINDS if not (gloo and k in ("all_to_all", "all_reduce_coalesced"))
        )
        self.dtypes = ("uint8", "int32", "float64") if gloo else bits.DTYPES
        self.layouts = ("contiguous", "offset") if gloo else LAYOUTS
        self.counts = COUNTS[1:] if gloo else COUNTS

    def ops(self, dtype: str) -> tuple[str, ...]:
        if self.layouts == LAYOUTS:
            return bits.ops_of(dtype)
        # Gloo's order of addition is its own: only exact operations can be compared.
        return ("MIN", "MAX") if dtype == "float64" else ("SUM", "PRODUCT", "BAND", "BXOR")


@st.composite
def steps(draw: st.DrawFn, able: Abilities, groups: tuple[tuple[int, ...], ...]) -> Step:
    kind = draw(st.sampled_from(able.kinds))
    dtype = draw(st.sampled_from(able.dtypes))
    group = draw(st.integers(0, len(groups) - 1))
    rank = st.integers(0, len(groups[group]) - 1)
    return Step(
        kind=kind,
        dtype=dtype,
        op=draw(st.sampled_from(able.ops(dtype))) if kind in REDUCING else "SUM",
        factor=draw(st.sampled_from((0.5, 3.0))),
        count=draw(st.sampled_from(able.counts)),
        group=group,
        root=draw(rank),
        peer=draw(rank),
        tag=draw(st.integers(0, 3)),
        layouts=tuple(draw(st.lists(st.sampled_from(able.layouts), min_size=1, max_size=4))),
        in_place=draw(st.booleans()),
        asynchronous=draw(st.booleans()),
        drain=draw(st.integers(0, 7)) == 0,
        seed=draw(st.integers(0, 2**31)),
    )


@st.composite
def plans(draw: st.DrawFn, able: Abilities) -> Plan:
    world = draw(st.sampled_from((2, 3, 4)))
    everyone = tuple(range(world))
    subsets = st.sets(st.sampled_from(everyone), min_size=1).map(lambda x: tuple(sorted(x)))
    groups = (everyone, *draw(st.lists(subsets, max_size=2)))
    drawn = draw(st.lists(steps(able, groups), min_size=20, max_size=60))
    return Plan(world, groups, tuple(drawn))


def test_random_programs(pool: Pool, backend: str, soak: bool) -> None:
    kinds: Counter[str] = Counter()

    # Without shrinking: a program that hangs would do so hundreds of times. The message
    # names the step instead.
    @settings(
        max_examples=3000 if soak else 50,
        derandomize=not soak,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(plans(Abilities(backend)))
    def check(plan: Plan) -> None:
        pool.run(run_plan, plan, world=plan.world, timeout=120)
        kinds.update(step.kind for step in plan.steps)

    check()
    assert sum(kinds.values()) > 1200
    assert not set(Abilities(backend).kinds) - set(kinds)


@pytest.mark.parametrize("dtype", ["int8", "int64", "float16", "bfloat16"])
def test_reference_of_averages(dtype: str) -> None:
    """The reference itself: integers toward zero, 16-bit floats in float32."""
    values: dict[str, list[float]] = {
        "int8": [-7, 4],
        "int64": [-7, 4],
        "float16": [1.0, 1.0 + 2**-10],
    }
    arrays = [bits.narrow(np.array([x]), dtype) for x in values.get(dtype, [1.0, 3.0])]
    found = bits.widen(bits.reduce("AVG", dtype, arrays), dtype)
    expected = {"int8": -1, "int64": -1, "float16": 1.0, "bfloat16": 2.0}
    assert found.tolist() == [expected[dtype]]
