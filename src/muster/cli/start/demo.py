"""``muster demo``: demonstrations on this machine: a short tour, and chapters of a minute or two."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command as cli_command
from muster.core import errors

if TYPE_CHECKING:
    from muster.app import domain, home
    from muster.app import settings as app_settings
    from muster.cli import output
    from muster.demo import outbreak, tour

HOME = Path(".muster") / "demo"
WIDTH = 80
CHAPTERS = ("tour", "worm", "roaming", "policies", "history")
_SUGGESTED = {
    "tour": ("status", "sub 'demo/>'", "pub demo/hello world"),
    "roaming": ("broker list", "message subscriptions"),
    "policies": ("notify models", "authority list", "activity"),
}
_SETTINGS = """\
# Created by `muster demo`, which also deletes this folder: store no files of your own here.
[domain]
name = "demo"
data_dir = "."
"""


@click.command(
    cls=cli_command.MusterCommand,
    examples=[
        ("muster demo", "a tour in ten seconds; the domain runs until Ctrl-C"),
        ("muster demo roaming", "JMS clients, and a broker that freezes under them"),
        ("muster demo worm", "10,000 simulated servers, a worm, and Spark"),
        ("muster demo worm --fleet 100000 --once", "ten times as many servers; stops at the end"),
    ],
)
@click.argument("chapter", type=click.Choice(CHAPTERS), default="tour")
@click.option(
    "--fleet",
    type=cli_command.CountParam(100, 1_000_000),
    default=10_000,
    show_default=True,
    envvar="FLEET",
    show_envvar=True,
    help="Number of simulated servers of `worm`.",
)
@click.option(
    "--attacks",
    type=cli_command.AmountParam(10.0, at_least=0.01),
    default=0.15,
    show_default=True,
    help="Attacks per second of each infected server of `worm`: with more, it spreads faster.",
)
@click.option(
    "--once", is_flag=True, help="Stop at the end of the demonstration; the default without a terminal."
)
@cli_command.pass_invocation
def demo(invocation: cli_command.Invocation, chapter: str, fleet: int, attacks: float, once: bool) -> None:
    """Start a demonstration domain on this machine.

    \b
    tour      messages, selection, storage, events by state, a killed process,
              failover
    worm      the whole loop: Spark detects a worm that spreads among simulated
              servers; exactly the servers at risk are isolated and patched,
              while a manager and a broker are killed
    roaming   JMS clients on three brokers: one broker freezes, its durable
              subscriber moves, and no stored message is lost
    policies  which events receivers accept from whom: addresses, policies,
              grants, a forged attribute, a revocation, and the explanation
    history   the past of a fleet: predicates, SQL, and an earlier state
              (needs the extra `history`, and no domain)

    Creates a home in ./.muster/demo (or --home) with free ports on loopback, and deletes it at the end. After
    a failure the home and its logs are kept until the next demo.
    """
    from muster.app import home

    place = home.Home.find(invocation.home or HOME)
    stay = not once and sys.stdout.isatty() and sys.stdin.isatty()
    if chapter == "worm":
        _expect_spark()
        _worm(invocation, place, fleet, attacks, stay=stay)
    elif chapter == "history":
        _history(invocation, place)
    else:
        _scenes(invocation, place, chapter, stay=stay)
    _remove(place)


def _fresh(place: home.Home, flags: Mapping[str, Any]) -> app_settings.Settings:
    """Replace the home of an earlier demo. Any other folder is left alone."""
    from muster.app import home
    from muster.app import settings as app_settings
    from muster.core.settings import loader

    if place.settings_file.exists() and place.settings_file.read_text() == _SETTINGS:
        with home.DomainFolder(place.root / "demo").hold():
            pass  # fails while an earlier demo still runs
        _clear(place)
    elif place.root.exists() and any(place.root.iterdir()):
        raise errors.AlreadyExists(
            f"{place.root} exists and was not created by a demo", hint="choose another folder with --home"
        )
    place.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.settings_file.write_text(_SETTINGS)
    place.stamp()
    return loader.load(app_settings.Settings, file=place.settings_file, flags=flags)


def _clear(place: home.Home) -> None:
    """Delete the settings last, so that an interrupted deletion still leaves a recognizable demo."""
    import shutil

    for path in place.root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != place.settings_file:
            path.unlink()
    place.settings_file.unlink()
    place.root.rmdir()


def _remove(place: home.Home) -> None:
    _clear(place)
    if place.root == HOME.absolute():
        with contextlib.suppress(OSError):  # it contains other files
            place.root.parent.rmdir()


def _printer(invocation: cli_command.Invocation) -> Callable[[tour.Scene], None]:
    """Print a scene: its name, and its text in the lines of a terminal with 80 columns."""
    import textwrap

    def show(scene: tour.Scene) -> None:
        record = {"scene": scene.name, "text": scene.line, **scene.facts}
        head = f"{scene.name:>10}  "
        line = textwrap.fill(
            scene.line,
            width=WIDTH,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )
        invocation.printer.item(record, line)

    return show


def _scenes(invocation: cli_command.Invocation, place: home.Home, chapter: str, *, stay: bool) -> None:
    """The chapters that are scenes on a running domain."""
    from muster.app import domain, process
    from muster.app.components import factories
    from muster.demo import frozen_broker, policies, tour

    flags: dict[str, Any] = dict(frozen_broker.FLAGS) if chapter == "roaming" else {}
    play = {"tour": tour.scenes, "roaming": frozen_broker.scenes, "policies": policies.scenes}[chapter]
    settings = _fresh(place, flags)
    printer = invocation.printer
    if printer.for_people:
        printer.note(f"starting a domain in {cli_command.display_path(place.root)}")
    began = time.perf_counter()
    running = domain.Domain(settings, components=factories.components(settings))
    show = _printer(invocation)

    async def work() -> None:
        show(tour.up(running, time.perf_counter() - began))
        async for scene in play(running):
            show(scene)
        _suggest(printer, place, _SUGGESTED[chapter], stay=stay)
        if stay:
            await tour.tick(running)

    cli_command.run(process.run(running, work, stopping=printer.stopping))


def _history(invocation: cli_command.Invocation, place: home.Home) -> None:
    from muster.demo import fleet_history

    _fresh(place, {})
    show = _printer(invocation)

    async def work() -> None:
        async for scene in fleet_history.scenes(place.root / "history"):
            show(scene)

    cli_command.run(work())
    _suggest(invocation.printer, place, (), stay=False)


def _suggest(printer: output.Printer, place: home.Home, commands: Sequence[str], *, stay: bool) -> None:
    if not printer.for_people:
        return
    muster = cli_command.program()
    if stay:
        option = f"--home {cli_command.display_path(place.root)}"
        lines = [
            "The domain runs until Ctrl-C. Try these commands in another terminal:",
            *(f"  {muster} {command} {option}" for command in commands),
        ]
    else:
        lines = ["Next, create a domain of your own:", f"  {muster} init && {muster} up --detach"]
    sys.stdout.write("\n".join(["", *lines, ""]))
    sys.stdout.flush()


def _worm(
    invocation: cli_command.Invocation, place: home.Home, fleet: int, attacks_s: float, *, stay: bool
) -> None:
    import asyncio

    from muster.app import domain, process
    from muster.app.components import factories
    from muster.demo import outbreak, scenario, worm

    printer = invocation.printer
    options = scenario.ScenarioOptions(
        plan=worm.WormPlan(servers=fleet, attempts_s=attacks_s),
        farms=2 if fleet <= 20_000 else 4,
        period_s=5.0 if fleet <= 20_000 else 10.0,
        start_s_max=240.0 + fleet / 100,
        contain_s_max=300.0 + fleet / 200,
    )
    settings = _fresh(place, scenario.flags(place.root, options))
    scenario.prepare(place.root)
    if printer.for_people:
        printer.note(
            f"starting {options.brokers} brokers, 2 managers and Spark in "
            f"{cli_command.display_path(place.root)}"
        )
    running = domain.Domain(settings, components=factories.components(settings))

    def show(name: str, line: str, facts: Mapping[str, Any]) -> None:
        printer.item({"scene": name, "text": line, **facts}, f"{name:>10}  {line}")

    async def work() -> None:
        ports = ", ".join(url.rpartition(":")[2] for url in running.servers)
        line = f"up: {len(running.servers)} brokers, on ports {ports} of this machine"
        show("domain", line, {"servers": list(running.servers)})
        await _show_dashboard(running, show)
        async with outbreak.Outbreak(running, options, show) as story:
            summary = await story.run()
            _summarise(printer, summary)
            _suggest(printer, place, ("top", "get --managers", "alert list", "activity"), stay=stay)
            if stay:
                await asyncio.get_running_loop().create_future()

    cli_command.run(process.run(running, work, stopping=printer.stopping))


def _expect_spark() -> None:
    """Fail early if Spark is not available."""
    import importlib.util
    import tempfile

    from muster.pipeline.source import java_runtime

    others = "the other chapters need no Spark"
    if importlib.util.find_spec("pyspark") is None:
        raise errors.MissingDependency(
            "the chapter `worm` needs Spark, which is not installed",
            hint=f"pip install 'muster-fabric[spark]'; {others}",
        )
    with tempfile.TemporaryDirectory() as folder:
        java_runtime.find(Path(folder))


async def _show_dashboard(running: domain.Domain, show: Callable[..., None]) -> None:
    import asyncio

    from muster.app.components import web

    if url := running.url_of("web"):
        password = await asyncio.to_thread(web.set_password, running.trust)
        line = f"{url}  (log in as {web.ADMINISTRATOR}, password {password})"
        show("dashboard", line, {"url": url, "password": password})


def _summarise(printer: output.Printer, summary: outbreak.OutbreakSummary) -> None:
    from dataclasses import asdict

    record = {"scene": "summary", **asdict(summary), "saved": summary.saved}
    lines = [
        "",
        f"to detect     {summary.detect_s:6.1f} s   from the worm's release to Spark's alert",
        f"to notify     {summary.notify_s:6.1f} s   from the alert to the first server that accepted it",
        f"to contain    {summary.contain_s:6.1f} s   from the release until nothing spreads",
        f"to heal       {summary.heal_s:6.1f} s   until every server has reported that it is patched",
        f"infected      {summary.fallen:6,} of {summary.servers:,} servers; "
        f"without Muster {summary.unhindered:,}: {summary.saved:,} saved",
        f"commands      {summary.commands:6,}, accepted {summary.deliveries:,} times, "
        f"executed {summary.operations:,} times",
        f"missed        {summary.not_done:6,}, repeated {summary.repeated:,}, "
        f"dropped {summary.dropped:,} messages or reports",
        f"reports       {summary.reports:6,} processed by Spark",
        f"forged        {summary.forged_reached:6,} servers accepted a forged command",
        f"killed        {', '.join(summary.killed) or 'nothing'}; "
        f"{summary.failovers:,} servers changed managers",
    ]
    printer.item(record, "\n".join(lines))
