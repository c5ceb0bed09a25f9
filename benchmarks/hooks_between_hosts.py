"""Times a training step under communication hooks where ranks are on hosts with slow links.

    python benchmarks/hooks_between_hosts.py
    python benchmarks/hooks_between_hosts.py --only "2 x 1, 1 Gbit/s" --json hooks.json

Hosts are those of between_hosts.py: network namespaces of this machine, whose links the kernel
shapes. Needs root. The MLP of 25 M parameters trains under dreamcomm's DistributedDataParallel; all
variants take turns, step by step, in one run of the same processes, and a step's time is that of
the slowest rank. Before that the weights of the ranks are compared, and those of the variants with
plain DDP's. Bytes are those that a host sends to others in a step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import dreamcomm
from between_hosts import Only, Setting, congestion, in_settings, run_between_hosts
from dreamcomm.tools.bench.measurement import Json, Measurement
from dreamcomm.tools.bench.turns import slowest_here, take_turns, timed
from models import Task, make_task
from training_variants import Trainer
from verified import CHECKED_STEPS, check_equal, check_near

SETTINGS = [Setting((1, 1), 1), Setting((1, 1), 10), Setting((2, 2), 1), Setting((2, 2), 10)]
PLAIN = "plain DDP"
START = 2  # PowerSGD's first step that compresses


@dataclass(frozen=True)
class Variant:
    """A hook's name, or "powerSGD", or none; tolerance: of weights, relative to plain DDP's."""

    hook: str = ""
    halves: bool = False  # the group sends 16 bits between hosts, where it would send float32
    tolerance: float = 0.0


VARIANTS = {
    PLAIN: Variant(),
    "hooks.bf16_feedback": Variant("bf16_feedback", tolerance=1e-3),
    'the same, internode_dtype="16bit"': Variant("bf16_feedback", True, 1e-3),
    "hooks.int8_feedback": Variant("int8_feedback", tolerance=1e-2),
    "torch's PowerSGD, rank 4": Variant("powerSGD", tolerance=5e-2),
}


class HookTrainer(Trainer):
    """A task under one variant."""

    def __init__(self, task: Task, variant: Variant) -> None:
        options = dreamcomm.Options(internode_dtype="16bit" if variant.halves else "float32")
        self.group = dist.new_group(pg_options=options)
        model = dreamcomm.DistributedDataParallel(task.model, process_group=self.group)
        if variant.hook == "powerSGD":
            state = powerSGD_hook.PowerSGDState(self.group, 4, START)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif variant.hook:
            hook = getattr(dreamcomm.hooks, variant.hook)
            model.register_comm_hook(dreamcomm.hooks.State(self.group), hook)
        super().__init__(task, model)

    def turn(self) -> tuple[float, int]:
        """Seconds of a step that all ranks begin together, and this rank's bytes to other hosts."""
        before = self.sent()
        return timed(self.step), self.sent() - before

    def sent(self) -> int:
        return sum(one["sent_between_hosts"] for one in dreamcomm.stats(self.group).values())


def measure(steps: int, hosts: int) -> dict[str, dict[str, float]]:
    trainers = {
        name: HookTrainer(make_task("mlp", dist.get_rank()), variant)
        for name, variant in VARIANTS.items()
    }
    for _ in range(CHECKED_STEPS):
        for trainer in trainers.values():
            trainer.step()
    weights = {name: trainer.weights() for name, trainer in trainers.items()}
    differences = {}
    for name, variant in VARIANTS.items():
        check_equal(name, weights[name])
        differences[name] = check_near(name, weights[name], weights[PLAIN], variant.tolerance)
    found = take_turns({name: one.turn for name, one in trainers.items()}, steps, rotates=True)
    rows = {}
    for name, turns in found.items():
        bytes_ = torch.tensor(turns[-1][1], dtype=torch.float64)
        dist.all_reduce(bytes_)
        rows[name] = {
            "seconds": median(slowest_here([seconds for seconds, _ in turns])),
            "bytes_of_a_host": bytes_.item() / hosts,
            "largest_weight_difference": differences[name],
        }
    return rows


def main(
    only: Only = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 10,
    json: Json = None,
) -> None:
    """Times training steps under hooks between hosts; see the head of this file."""
    control = congestion()
    measurement = Measurement(json, congestion=control)
    results: list[dict[str, Any]] = []
    for setting in in_settings(SETTINGS, only):
        rows = run_between_hosts(setting, control, measure, steps, len(setting.ranks))
        results.append({"setting": asdict(setting), "variants": rows})
        measurement.table(
            f"{setting.name}: a step of the MLP of 25 M parameters",
            ("", "p50", "a host sends", "times as fast as plain"),
            (
                (
                    variant,
                    f"{1e3 * row['seconds']:.0f} ms",
                    f"{row['bytes_of_a_host'] / 1e6:.1f} MB",
                    f"{rows[PLAIN]['seconds'] / row['seconds']:.2f}",
                )
                for variant, row in rows.items()
            ),
        )
    measurement.write(steps=steps, settings=results)


if __name__ == "__main__":
    typer.run(main)
