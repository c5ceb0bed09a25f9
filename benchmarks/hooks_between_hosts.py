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

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import dreamcomm
from between_hosts import Setting, congestion, run_between_hosts
from machine import check_output, describe_machine, write_json
from models import Task, make_task
from training_variants import LEARNING_RATE, digest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from internode.network import NoNetwork  # found by the line above

SETTINGS = [Setting((1, 1), 1), Setting((1, 1), 10), Setting((2, 2), 1), Setting((2, 2), 10)]
PLAIN = "plain DDP"
START = 2  # PowerSGD's first step that compresses
CHECKED_STEPS = 3


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


class Trainer:
    """A task under one variant."""

    def __init__(self, task: Task, variant: Variant) -> None:
        self.task = task
        options = dreamcomm.Options(internode_dtype="16bit" if variant.halves else "float32")
        self.group = dist.new_group(pg_options=options)
        self.model = dreamcomm.DistributedDataParallel(task.model, process_group=self.group)
        if variant.hook == "powerSGD":
            state = powerSGD_hook.PowerSGDState(self.group, 4, START)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif variant.hook:
            hook = getattr(dreamcomm.hooks, variant.hook)
            self.model.register_comm_hook(dreamcomm.hooks.State(self.group), hook)
        self.optimizer = torch.optim.SGD(task.model.parameters(), lr=LEARNING_RATE)

    def step(self) -> tuple[float, int]:
        """Seconds of a step that all ranks begin together, and this rank's bytes to other hosts."""
        before = self.sent()
        dist.barrier()
        begin = perf_counter()
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(self.task.inputs), self.task.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return perf_counter() - begin, self.sent() - before

    def sent(self) -> int:
        return sum(one["sent_between_hosts"] for one in dreamcomm.stats(self.group).values())


def measure(steps: int, hosts: int) -> dict[str, dict[str, float]]:
    trainers = {
        name: Trainer(make_task("mlp", dist.get_rank()), variant)
        for name, variant in VARIANTS.items()
    }
    for _ in range(CHECKED_STEPS):
        for trainer in trainers.values():
            trainer.step()
    differences = {name: verify(name, trainers) for name in VARIANTS}
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    moved = dict.fromkeys(VARIANTS, 0)
    names = [*VARIANTS]
    for number in range(steps):
        first = number % len(names)  # the order rotates: no variant always follows the same one
        for name in names[first:] + names[:first]:
            seconds, moved[name] = trainers[name].step()
            times[name].append(seconds)
    rows = {}
    for name in VARIANTS:
        slowest = torch.tensor(times[name], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        bytes_ = torch.tensor(moved[name], dtype=torch.float64)
        dist.all_reduce(bytes_)
        rows[name] = {
            "seconds": median(slowest.tolist()),
            "bytes_of_a_host": bytes_.item() / hosts,
            "largest_weight_difference": differences[name],
        }
    return rows


def verify(name: str, trainers: dict[str, Trainer]) -> float:
    """The largest difference of a weight from plain DDP's, over the largest weight.

    Raises RuntimeError if it is more than the variant may have, or the ranks' weights differ.
    """
    weights, plain = (
        [one.detach() for one in trainers[which].task.model.parameters()] for which in (name, PLAIN)
    )
    difference = max(
        ((one - other).abs().max() / other.abs().max()).item()
        for one, other in zip(weights, plain, strict=True)
    )
    digests: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest(weights))
    if len(set(digests)) != 1:
        raise RuntimeError(f"the ranks' weights differ after training with {name}")
    if difference > VARIANTS[name].tolerance:
        raise RuntimeError(f"{name}: weights differ from plain DDP's by {difference:.2g}")
    return difference


def print_rows(console: Console, name: str, rows: dict[str, dict[str, float]]) -> None:
    table = Table(title=f"{name}: a step of the MLP of 25 M parameters", title_justify="left")
    table.add_column("")
    for heading in ("p50", "a host sends", "times as fast as plain"):
        table.add_column(heading, justify="right")
    for variant, row in rows.items():
        table.add_row(
            variant,
            f"{1e3 * row['seconds']:.0f} ms",
            f"{row['bytes_of_a_host'] / 1e6:.1f} MB",
            f"{rows[PLAIN]['seconds'] / row['seconds']:.2f}",
        )
    console.print(table)


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="A setting's name; repeatable.", show_default="all")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each variant.")] = 10,
    json: Annotated[Path | None, typer.Option(help="Where to write the figures.")] = None,
) -> None:
    """Times training steps under hooks between hosts; see the head of this file."""
    check_output(json)
    console = Console(width=100)
    settings = [s for s in SETTINGS if not only or s.name in only]
    if not settings:
        raise typer.BadParameter(f"expected one of: {'; '.join(s.name for s in SETTINGS)}")
    control = congestion()
    results: list[dict[str, Any]] = []
    for setting in settings:
        try:
            rows = run_between_hosts(setting, control, measure, steps, len(setting.ranks))
        except NoNetwork as why:
            console.print(str(why), style="red")
            raise typer.Exit(1) from None
        results.append({"setting": asdict(setting), "variants": rows})
        print_rows(console, setting.name, rows)
    if json is not None:
        machine = {**describe_machine(), "congestion": control}
        write_json(json, {"machine": machine, "steps": steps, "settings": results})


if __name__ == "__main__":
    typer.run(main)
