"""Trains a small model on handwritten digits, by each of the ways of docs/loose_coupling.md.

    torchrun --nproc-per-node 4 examples/strategies/train.py --strategy diloco

--strategy takes several words too: `--strategy server,async` runs one after the other, prints one
table and, with --plot runs.png, draws both. `--slow 1` makes each step of rank 1 take four times as
long. One loop runs all strategies; the file of each makes a model, and an object with zero_grad()
and step(). `python examples/strategies/train.py` starts four ranks itself, by dreamcomm.spawn.

It needs scikit-learn, and matplotlib for a plot: `pip install '.[examples]'`.
"""

import argparse
import copy
import importlib
import os
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dreamcomm
from digits import Batches, load, make_model, score
from strategy import Job, Training

# Each word's file.
STRATEGIES = {
    "ddp": "ddp",
    "server": "server",
    "async": "async_server",
    "local_sgd": "local_sgd",
    "diloco": "diloco",
    "gossip": "gossip",
}
SLOW = 4  # a slow rank's step takes so many times as long


@dataclass
class Point:
    """Rank 0's model at one time, on the rows for the test."""

    seconds: float
    accuracy: float
    loss: float


@dataclass
class Run:
    """What a strategy has done. Lists have an entry for each rank.

    Attributes:
        seconds: from the first rank's first step to the end of the last one.
        servers: the number of ranks that were servers, from 0 on.
        steps: a server has none, and an asynchronous worker may have come when all were done.
        accuracies: of the models at the end.
        sent: bytes.
        waited: seconds in backward() and step() without work.
        points: over time.
    """

    name: str
    seconds: float
    servers: int
    steps: list[int]
    accuracies: list[float]
    sent: list[int]
    waited: list[float]
    points: list[Point]


def train(training: Training, job: Job, images: Tensor, digits: Tensor) -> tuple[int, float]:
    """The loop of all strategies. Returns the steps, and the seconds in them without work."""
    options, rank, waited = job.options, dist.get_rank(), 0.0
    workers = dist.get_world_size() - training.servers
    batches = Batches(options.seed, rank - training.servers, workers)
    pace = options.pace / 1000 * (SLOW if rank == options.slow else 1)
    for step in count():
        over = step >= job.steps if training.is_done is None else training.is_done(step)
        if over or training.optimizer is None:
            return step, waited
        begin = time.monotonic()
        rows = next(batches)
        training.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(training.model(images[rows]), digits[rows])
        # As if the model were larger, and each rank had a machine of its own.
        time.sleep(max(begin + pace - time.monotonic(), 0))
        idle = time.monotonic() - time.thread_time()
        loss.backward()
        training.optimizer.step()
        waited += time.monotonic() - time.thread_time() - idle
        job.note(step + 1)


def run(name: str, number: int, options: argparse.Namespace, data: tuple[Tensor, Tensor]) -> Run:
    """Trains by a strategy. Collective."""
    model = make_model(options.seed)
    copies: list[tuple[float, nn.Module]] = []  # scored afterwards, as that takes time

    def note(step: float) -> None:
        if step % options.every == 0:
            copies.append((time.monotonic(), copy.deepcopy(model)))

    job = Job(f"{name} {number}", options.steps, note, options)
    strategy = importlib.import_module(STRATEGIES[name])
    dist.barrier()
    note(0)
    training = strategy.prepare(model, job)
    begin = time.monotonic()
    steps, waited = train(training, job, *data)
    end, sent = time.monotonic(), training.sent()
    training.close()
    mine = (begin, end, steps, score(model, *data)[0], sent, waited)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    begins, ends, *lists = zip(*everyone, strict=True)
    first = min(begins[training.servers :])  # the ranks of a machine share the clock
    points = [Point(max(moment - first, 0), *score(copied, *data)) for moment, copied in copies]
    return Run(name, max(ends) - first, training.servers, *map(list, lists), points)


def train_all(options: argparse.Namespace) -> list[Run]:
    """Runs on every rank."""
    torch.set_num_threads(1)
    data = load()
    runs = [run(name, number, options, data) for number, name in enumerate(options.strategy)]
    if dist.get_rank() == 0:
        print(table(runs))
        if options.plot:
            from picture import draw  # needs matplotlib

            draw(runs, options.plot)
            print(f"wrote {options.plot}")
    return runs


def table(runs: list[Run]) -> str:
    """A line for each run: the worst rank's accuracy, the most that a rank has sent and waited."""
    lines = ["strategy   steps  seconds  accuracy  bytes a step  of a server  waited s"]
    for one in runs:
        steps, servers = max(one.steps), one.servers
        sent = [max(part, default=0) / steps for part in (one.sent[servers:], one.sent[:servers])]
        lines.append(
            f"{one.name:9}  {steps:5}  {one.seconds:7.2f}  {min(one.accuracies):8.3f}  "
            f"{sent[0]:12,.0f}  {sent[1]:11,.0f}  {max(one.waited):8.2f}"
        )
    return "\n".join(lines)


def words(text: str) -> list[str]:
    """The strategies that an option names."""
    found = list(STRATEGIES) if text == "all" else text.split(",")
    for name in found:
        if name not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise argparse.ArgumentTypeError(f"{name!r} is none of: {known}, all")
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of a command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", type=words, default=["ddp"], help=", ".join(STRATEGIES))
    parser.add_argument("--ranks", type=int, default=4, help="without torchrun")
    parser.add_argument("--steps", type=int, default=300, help="of each rank")
    parser.add_argument("--slow", type=int, help="a rank whose steps take four times as long")
    parser.add_argument("--pace", type=float, default=10, help="the least milliseconds of a step")
    parser.add_argument("--every", type=int, default=10, help="steps between points of the plot")
    parser.add_argument("--plot", type=Path, help="a file for accuracy and loss over time")
    parser.add_argument("--staleness", type=int, help="the bound of async; without: none")
    parser.add_argument("--bound", type=int, default=0, help="of gossip: steps to be late by")
    parser.add_argument("--period", type=int, default=10, help="steps of a round")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.slow is not None and options.pace <= 0:
        parser.error("--slow needs a --pace above 0: four times as long as what?")
    return options


def main() -> None:
    """Starts ranks, or is one of torchrun's."""
    options = parse()
    if "RANK" not in os.environ:
        dreamcomm.spawn(train_all, options.ranks, args=(options,))
        return
    dist.init_process_group("dreamcomm")
    train_all(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
