"""``dreamcomm simulate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dreamcomm.tools.simulate import defaults

if TYPE_CHECKING:
    from dreamcomm.tools.simulate.cluster import Cluster
    from dreamcomm.tools.simulate.predict import Training
    from dreamcomm.tools.simulate.scaling import Line

Described = Annotated[
    Path | None,
    typer.Option(
        "--cluster", help="A TOML file, instead of the flags.", exists=True, dir_okay=False
    ),
]
Hosts = Annotated[int, typer.Option(min=1, help="Hosts; --up-to simulates growing numbers.")]
RanksPerHost = Annotated[int, typer.Option(min=1, help="Ranks of each host.")]
Within = Annotated[str, typer.Option(help="Time of a turn within a host, such as 1us.")]
WithinRate = Annotated[str, typer.Option(help="Rate of a rank's copies, such as 10GB/s.")]
Between = Annotated[str, typer.Option(help="Time of a message between hosts, such as 40us.")]
Message = Annotated[str, typer.Option(help="Time of its ranks for a further one, such as 10us.")]
BetweenRate = Annotated[str, typer.Option(help="Rate of a host's link, such as 10Gbit/s.")]
Op = Annotated[str, typer.Option(help="A collective, such as all_gather.")]
Sizes = Annotated[str, typer.Option(help="Bytes of one rank's block: a list, such as 1KiB,64MiB.")]
UpTo = Annotated[
    int | None,
    typer.Option(
        help="1, 2, 4, ... such hosts, all alike, up to so many ranks.",
        show_default="as described",
    ),
]
Gradients = Annotated[
    str | None, typer.Option(help="Bytes of all gradients: predicts steps of DDP, too.")
]
Bucket = Annotated[str, typer.Option(help="Bytes of a bucket of DDP.")]
Forward = Annotated[str, typer.Option(help="A rank's forward pass, as 10ms.")]
Backward = Annotated[str, typer.Option(help="A rank's backward pass, as 20ms.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw here (png, svg or pdf).")]


DESCRIBING = (
    "hosts", "ranks_per_host", "latency_within", "bandwidth_within", "latency_between",
    "message_between", "bandwidth_between",
)  # fmt: skip


def simulate(
    context: typer.Context,
    cluster: Described = None,
    hosts: Hosts = defaults.HOSTS,
    ranks_per_host: RanksPerHost = defaults.RANKS_PER_HOST,
    latency_within: Within = defaults.LATENCY_WITHIN,
    bandwidth_within: WithinRate = defaults.BANDWIDTH_WITHIN,
    latency_between: Between = defaults.LATENCY_BETWEEN,
    message_between: Message = defaults.MESSAGE_BETWEEN,
    bandwidth_between: BetweenRate = defaults.BANDWIDTH_BETWEEN,
    op: Op = "all_reduce",
    sizes: Sizes = "1KiB,1MiB,64MiB",
    up_to: UpTo = None,
    gradients: Gradients = None,
    bucket: Bucket = "25MiB",
    forward: Forward = "10ms",
    backward: Backward = "20ms",
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Predicts collectives and training steps on a cluster that need not exist.

    It uses the cost model by which groups of several hosts choose; up to 16,384 ranks.
    """
    from rich.console import Console

    from dreamcomm.tools.cli.output import told_file
    from dreamcomm.tools.simulate.report import table, to_json
    from dreamcomm.tools.simulate.units import parse_bytes

    flags: dict[str, Any] = {
        "hosts": hosts,
        "ranks_per_host": ranks_per_host,
        "within": {"latency": latency_within, "bandwidth": bandwidth_within},
        "between": {
            "latency": latency_between,
            "message": message_between,
            "bandwidth": bandwidth_between,
        },
    }
    try:
        check_files(json_file, plot)
        if cluster is not None:
            check_no_flags(context)
        lines = predicted(
            op,
            [parse_bytes(size) for size in sizes.split(",")],
            cluster_of(cluster, flags),
            up_to,
            training_of(gradients, bucket, forward, backward),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    Console().print(table(op, lines))
    if json_file is not None:
        with told_file(json_file):
            json_file.write_text(json.dumps(to_json(op, lines), indent=1) + "\n")
    if plot is not None:
        from dreamcomm.tools.simulate.plot import draw

        with told_file(plot):
            draw(op, lines, plot)


def check_files(json_file: Path | None, plot: Path | None) -> None:
    """Raises ValueError if they cannot be written; matplotlib is loaded for a picture only."""
    for path in (json_file, plot):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise ValueError(f"expected the path of a file, got that of the folder {path}")
    if plot is not None:
        from dreamcomm.tools.simulate.plot import check_ending

        check_ending(plot)


def check_no_flags(context: typer.Context) -> None:
    """Raises ValueError if flags describe a cluster, too."""
    for name in DESCRIBING:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"--cluster describes the whole cluster: leave {flag} away")


def cluster_of(path: Path | None, flags: dict[str, Any]) -> Cluster:
    """Raises ValueError if there is none."""
    from dreamcomm.tools.simulate.cluster import described
    from dreamcomm.tools.simulate.read import read_cluster

    return read_cluster(path) if path is not None else described(flags)


def training_of(gradients: str | None, bucket: str, forward: str, backward: str) -> Training | None:
    """Raises ValueError if a size or a time is none."""
    from dreamcomm.tools.simulate.predict import Training
    from dreamcomm.tools.simulate.units import parse_bytes, parse_time

    training = Training(
        gradients=parse_bytes(bucket if gradients is None else gradients),
        bucket=parse_bytes(bucket),
        forward=parse_time(forward),
        backward=parse_time(backward),
    )
    return training if gradients is not None else None


def predicted(
    op: str, sizes: list[int], cluster: Cluster, up_to: int | None, training: Training | None
) -> list[Line]:
    """Raises ValueError if something cannot be predicted."""
    from dreamcomm.tools.simulate.scaling import line_of, scaling

    if up_to is None:
        return [line_of(op, sizes, cluster, training)]
    return scaling(op, sizes, cluster, up_to, training)
