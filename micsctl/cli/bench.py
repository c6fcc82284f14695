"""bench traffic, strategies, collectives, scaling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from micsctl.bench.crossover import COMPUTE_LINK_MBPS, COMPUTE_PER_TRAFFIC, LINKS_MBPS
from micsctl.cli.options import Options
from micsctl.cli.own import writable
from micsctl.cli.render import plain
from micsctl.cli.session import Session
from micsctl.cli.testbed import Wish, in_own_sandbox, on_cluster, running
from micsctl.errors import ExitCode, UsageError
from micsctl.report import bench as shown
from micsctl.report import bench_plot
from micsctl.report.plot import require_matplotlib
from micsctl.report.table import Table

if TYPE_CHECKING:
    from mics.config import TrainConfig
    from mics.shapes import ModelShape

    from micsctl.bench.testbed import Job, Testbed

NODES, DEVICES, LINK_MBPS = 4, 2, 400  # of a sandbox of the benchmark's own
SLOW_LINK_MBPS = 100  # beside compute that is waited for: what ranks really compute on shared cores then matters little
_NONE: Mapping[str, str] = MappingProxyType({})
SMALL = "gpt-3m"  # where seconds matter less than minutes

Steps = Annotated[int, typer.Option(help="Rounds that count: in each, every strategy makes a step.", min=1)]
Warmup = Annotated[int, typer.Option(help="Rounds before these.", min=0)]
Output = Annotated[Path | None, typer.Option(help="Folder of report.html and result.json; default: bench/<name>.")]
Model = Annotated[str | None, typer.Option(help="A preset; default: a GPT of 16.8 M parameters in equal blocks.")]
Nodes = Annotated[int | None, typer.Option(help=f"Of the benchmark's own sandbox; default: {NODES}.", min=1, max=64)]
Devices = Annotated[int | None, typer.Option(help=f"Of each of its nodes; default: {DEVICES}.", min=1, max=8)]
Link = Annotated[int | None, typer.Option(help=f"Mbit/s of its links; default: {LINK_MBPS}.", min=1, max=100_000)]
BareLink = Annotated[int | None, typer.Option(help="Mbit/s of its links; default: not shaped.", min=1, max=100_000)]
TrafficNodes = Annotated[
    int | None, typer.Option(help="With 2 devices each; as many ranks with 1 and 4; default: 4.", min=1, max=64)
]
TrafficDevices = Annotated[int | None, typer.Option(help="Of each of its nodes; default: 1, 2 and 4.", min=1, max=8)]
ScalingLink = Annotated[
    int | None,
    typer.Option(
        help=f"Mbit/s of its links; default: {LINK_MBPS}, with --emulate-compute {SLOW_LINK_MBPS}.", min=1, max=100_000
    ),
]
Names = Annotated[str | None, typer.Option("--strategies", help="Only these: mics,zero3,deepspeed-zero3 ...")]


def strategies(
    options: Options,
    names: Names = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Where it stops paying: zero3 against mics.")] = False,
    links: Annotated[
        str | None, typer.Option(help=f"Of --sweep: Mbit/s; default: {LINKS_MBPS}.", show_default=False)
    ] = None,
    model: Model = None,
    steps: Steps = 7,
    warmup: Warmup = 3,
    nodes: Nodes = None,
    devices_per_node: Devices = None,
    link_mbps: Link = None,
    output: Output = None,
) -> None:
    """Compare strategies on the same model, data, seed and links.

    Interleaved steps, medians and spread; bytes against the formula; losses that must be equal.
    """
    from micsctl.bench import cells, compare

    chosen, rates = cells.chosen(names), cells.link_rates(links or LINKS_MBPS)
    if sweep and names:
        raise UsageError("--sweep compares zero3 and mics only", "--strategies has no meaning there")
    if links and not sweep:
        raise UsageError("--links belongs to --sweep", "one benchmark has one rate", next="--link-mbps RATE")
    session, wish = Session.of(options), Wish(nodes, devices_per_node, link_mbps)
    folder = _ready(output, "crossover" if sweep else "strategies", "strategies --sweep" if sweep else "strategies")
    if sweep:
        _sweep(session, wish, rates, compare.model_of(model), folder, steps=steps, warmup=warmup)
        return
    with _testbed(session, wish, model, default=cells.DEFAULT_MODEL) as testbed:
        job, left_out = compare.strategies_job(testbed, chosen, steps=steps, warmup=warmup)
    found = compare.strategies(job, None, left_out)
    if testbed.own and testbed.site.link_mbps:
        if not _write(found, folder, shown.strategies_page(found)):  # whatever becomes of the rest
            session.render.note(f"  wrote {folder / 'report.html'}; now on links that are not shaped")
        names_left = tuple(dict.fromkeys(entry.strategy for entry in job.entries))
        site = testbed.site
        with in_own_sandbox(
            session, testbed.model, nodes=site.nodes, devices_per_node=site.ranks_per_node, link_mbps=None
        ) as bare:
            unshaped, _ = compare.strategies_job(bare, names_left, steps=steps, warmup=warmup)
        found = compare.strategies(job, unshaped, left_out)
    _answer(session, found, folder, shown.strategies_page(found), shown.verdict(found), shown.strategies(found))
    if not found.losses_equal:
        raise typer.Exit(ExitCode.FAILURE)


def traffic(
    options: Options,
    names: Names = None,
    model: Annotated[str | None, typer.Option(help="A preset; default: a GPT of 4.4 M parameters.")] = None,
    steps: Steps = 2,
    warmup: Warmup = 1,
    nodes: TrafficNodes = None,
    devices_per_node: TrafficDevices = None,
    link_mbps: BareLink = None,
    output: Output = None,
) -> None:
    """Hold the bytes that leave each node against the formula.

    Every strategy at every partition size, with 1 and 4 micro-steps; exit code 1 where one is outside.
    """
    from micsctl.bench import cells, compare

    chosen, folder = cells.chosen(names), _ready(output, "traffic")
    session, wish = Session.of(options), Wish(nodes, devices_per_node, link_mbps)
    parts = []
    for opened in _traffic_testbeds(session, wish, model):
        with opened as testbed:
            parts.append(compare.traffic(testbed, chosen, steps=steps, warmup=warmup))
    found = compare.traffic_result(parts)
    verdict = shown.traffic_verdict(found)
    _answer(session, found, folder, shown.traffic_page(found), verdict, shown.traffic(found))
    if not found.ok:
        raise typer.Exit(ExitCode.FAILURE)


def collectives(
    options: Options,
    steps: Annotated[int, typer.Option(help="Repeats of each collective at each size, at most.", min=1)] = 7,
    nodes: Nodes = None,
    devices_per_node: Devices = None,
    link_mbps: Link = None,
    output: Output = None,
) -> None:
    """Time gathers, reduce-scatters and hop 2, flat and in two stages.

    Latency and rate of each, and its share of what one TCP stream carries between two nodes.
    """
    from mics.probes import MeasureConfig

    from micsctl.bench.collectives import result

    if (nodes, devices_per_node) == (1, 1):
        raise _no_collectives()
    folder = _ready(output, "collectives")
    session, wish = Session.of(options), Wish(nodes, devices_per_node, link_mbps)
    with _testbed(session, wish, None, default=SMALL) as testbed:
        if testbed.site.world_size == 1:
            raise _no_collectives()
        found = result(testbed.measure(MeasureConfig(repeats=steps)), testbed.site)
    verdict = shown.collectives_verdict(found)
    _answer(session, found, folder, shown.collectives_page(found), verdict, shown.collectives(found))


def scaling(
    options: Options,
    sizes: Annotated[str, typer.Option(help="Numbers of nodes.")] = "1,2,4,8",
    emulate_compute: Annotated[
        bool, typer.Option("--emulate-compute", help="Ranks wait until compute : hop 2 is as predicted for bert-10b.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Jobs of each size, interleaved.", min=1)] = 3,
    model: Annotated[
        str | None, typer.Option(help="A preset; default: a GPT of 3.1 M parameters in 12 blocks.")
    ] = None,
    steps: Steps = 2,
    warmup: Warmup = 1,
    devices_per_node: Devices = None,
    link_mbps: ScalingLink = None,
    output: Output = None,
) -> None:
    """Weak and strong scaling over numbers of nodes.

    With --emulate-compute a diagnostic: compute is waited for, every byte of communication is real.
    """
    from micsctl.bench import cells, compare

    asked = cells.sizes(sizes, most=64)
    if emulate_compute and asked[-1] == 1:
        raise UsageError("one node has no hop 2 to emulate compute for", "", next="--sizes 1,2,4")
    folder = _ready(output, "scaling")
    session, wish = Session.of(options), Wish(None, devices_per_node, link_mbps)
    link = SLOW_LINK_MBPS if emulate_compute else LINK_MBPS
    with _testbed(session, wish, model, nodes=asked[-1], link=link, default=cells.SCALING_MODEL) as testbed:
        cells.sizes(sizes, most=testbed.site.nodes)
        found = compare.scale(testbed, asked, steps=steps, warmup=warmup, rounds=rounds, emulate=emulate_compute)
    _answer(session, found, folder, shown.scaling_page(found), found.notes, shown.scaling(found))


def _sweep(
    session: Session, wish: Wish, rates: Sequence[int], model: TrainConfig, folder: Path, *, steps: int, warmup: int
) -> None:
    """Always in sandboxes of its own: the links of a cluster that is up cannot be changed."""
    from micsctl.bench import compare

    shape = {"nodes": wish.nodes or NODES, "devices_per_node": wish.devices_per_node or DEVICES}
    if shape["nodes"] == 1:
        raise UsageError("a sweep over links needs two nodes", "nothing leaves a single one", next="--nodes 4")

    def on_links(link_mbps: int | None, ratios: Sequence[float | None] = (None,)) -> list[Job]:
        with in_own_sandbox(session, model, **shape, link_mbps=link_mbps) as testbed:
            compare.require_shaped(testbed)
            return [
                compare.crossover_job(testbed, steps=steps, warmup=warmup, compute_per_traffic=ratio)
                for ratio in ratios
            ]

    [unshaped] = on_links(None)
    over_links = [job for rate in rates for job in on_links(rate)]
    over_compute = on_links(wish.link_mbps or COMPUTE_LINK_MBPS, COMPUTE_PER_TRAFFIC)
    found = compare.crossover(unshaped, over_links, over_compute)
    pictures = {"crossover.svg": bench_plot.crossover(found)}
    verdict, table = shown.crossover_verdict(found), shown.crossover(found)
    _answer(session, found, folder, shown.crossover_page(found), verdict, table, pictures)


def _traffic_testbeds(session: Session, wish: Wish, model: str | None) -> list[AbstractContextManager[Testbed]]:
    """The cluster that is up; else one sandbox after the other, with different numbers of devices on a node."""
    from micsctl.bench import cells, compare

    if cluster := running(session):
        return [
            on_cluster(session, cluster, wish, compare.model_of(model, session.spec.train, default=cells.TRAFFIC_MODEL))
        ]
    trained = compare.model_of(model, default=cells.TRAFFIC_MODEL)
    return [
        in_own_sandbox(session, trained, nodes=nodes, devices_per_node=devices, link_mbps=wish.link_mbps)
        for nodes, devices in cells.shapes(wish.nodes or NODES, wish.devices_per_node)
    ]


def _testbed(
    session: Session,
    wish: Wish,
    model: str | None,
    *,
    nodes: int = NODES,
    link: int = LINK_MBPS,
    default: str | ModelShape,
) -> AbstractContextManager[Testbed]:
    from micsctl.bench import compare

    if cluster := running(session):
        return on_cluster(session, cluster, wish, compare.model_of(model, session.spec.train, default=default))
    return in_own_sandbox(
        session,
        compare.model_of(model, default=default),
        nodes=wish.nodes or nodes,
        devices_per_node=wish.devices_per_node or DEVICES,
        link_mbps=wish.link_mbps or link,
    )


def _ready(output: Path | None, name: str, command: str = "") -> Path:
    """The folder of the report, which can be written. Before minutes are spent."""
    require_matplotlib()
    folder = output or Path("bench") / name
    writable(folder, f"micsctl bench {command or name}")
    return folder


def _no_collectives() -> UsageError:
    return UsageError("one device has no collectives", "nothing is exchanged", next="--devices-per-node 2")


def _answer(
    session: Session,
    found: Any,
    folder: Path,
    page: str,
    verdict: Sequence[str],
    table: Table,
    pictures: Mapping[str, str] = _NONE,
) -> None:
    """On the terminal first: what took minutes to measure is not lost with a full disk."""
    session.render.result(found, table, text="\n".join(verdict))
    if why := _write(found, folder, page, pictures):
        session.render.warning(f"the report was not written: {why}; the figures are above")
        raise typer.Exit(ExitCode.FAILURE)
    session.render.note(f"  wrote {folder / 'report.html'} and {folder / 'result.json'}")


def _write(found: Any, folder: Path, page: str, pictures: Mapping[str, str] = _NONE) -> str:
    """Why it could not be written, which leaves an older report as it was; "" where it was."""
    files = {"report.html": page, "result.json": json.dumps(plain(found), indent=2) + "\n", **pictures}
    drafts = {folder / f".{name}.new": folder / name for name in files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for draft, text in zip(drafts, files.values(), strict=True):
            draft.write_text(text, encoding="utf-8")
        for draft, path in drafts.items():
            draft.replace(path)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    finally:
        for draft in drafts:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
    return ""
