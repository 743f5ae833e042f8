"""``muster demo``: a domain on this machine, at work: a short tour, or the whole loop against a worm."""

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
    from muster.demo import outbreak

HOME = Path(".muster") / "demo"
_SETTINGS = """\
# Made by `muster demo`, which also removes it: keep nothing of your own in this folder.
[domain]
name = "demo"
data_dir = "."
"""


@click.command(
    cls=cli_command.MusterCommand,
    examples=[
        ("muster demo", "a tour in ten seconds; leaves the domain up until Ctrl-C"),
        ("muster demo worm", "the whole loop: 10,000 servers, a worm among them, and Spark"),
        ("muster demo worm --fleet 100000 --once", "ten times as many; stops by itself"),
    ],
)
@click.argument("story", type=click.Choice(["tour", "worm"]), default="tour")
@click.option(
    "--fleet",
    type=click.IntRange(100, 1_000_000),
    default=10_000,
    show_default=True,
    envvar="FLEET",
    show_envvar=True,
    help="Simulated servers of the worm's story.",
)
@click.option("--once", is_flag=True, help="Stop when everything has been shown, as without a terminal.")
@cli_command.pass_invocation
def demo(invocation: cli_command.Invocation, story: str, fleet: int, once: bool) -> None:
    """Start a domain on this machine and show it at work.

    The tour sends, asks, selects, stores and takes over. The worm's story is the whole of Muster: a fleet of
    simulated web servers reports, Spark sees a worm spread among them, controllers command exactly those at
    risk, managers isolate and patch; and a manager and a broker are killed meanwhile.

    Makes a fresh home in ./.muster/demo (or where --home says), on free ports of loopback, and removes it at
    the end; where something failed it stays, with its logs, until the next demo.
    """
    from muster.app import home

    place = home.Home.find(invocation.home or HOME)
    stay = not once and sys.stdout.isatty() and sys.stdin.isatty()
    if story == "tour":
        _tour(invocation, place, _fresh(place, {}), stay=stay)
    else:
        _worm(invocation, place, fleet, stay=stay)
    _remove(place)


def _fresh(place: home.Home, flags: Mapping[str, Any]) -> app_settings.Settings:
    """A new home in the place of an earlier demo's; anything else that is there is left alone."""
    from muster.app import home
    from muster.app import settings as app_settings
    from muster.core.settings import loader

    if place.settings_file.exists() and place.settings_file.read_text() == _SETTINGS:
        with home.DomainFolder(place.root / "demo").hold():
            pass  # refused while an earlier demo still runs
        _clear(place)
    elif place.root.exists() and any(place.root.iterdir()):
        raise errors.AlreadyExists(
            f"{place.root} is there, and not from a demo", hint="name another folder with --home"
        )
    place.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.settings_file.write_text(_SETTINGS)
    return loader.load(app_settings.Settings, file=place.settings_file, flags=flags)


def _clear(place: home.Home) -> None:
    """The settings go last: if this is cut short, what is left is still known for a demo's."""
    import shutil

    for one in place.root.iterdir():
        if one.is_dir():
            shutil.rmtree(one)
        elif one != place.settings_file:
            one.unlink()
    place.settings_file.unlink()
    place.root.rmdir()


def _remove(place: home.Home) -> None:
    _clear(place)
    if place.root == HOME.absolute():
        with contextlib.suppress(OSError):  # something else is in it
            place.root.parent.rmdir()


def _tour(
    invocation: cli_command.Invocation, place: home.Home, settings: app_settings.Settings, *, stay: bool
) -> None:
    from muster.app import domain, process
    from muster.app import settings as app_settings
    from muster.demo import tour as demo_tour

    printer = invocation.printer
    if printer.for_people:
        printer.note(f"starting a domain in {cli_command.display_path(place.root)}")
    began = time.perf_counter()
    running = domain.Domain(settings, parts=app_settings.components(settings))

    def show(scene: demo_tour.Scene) -> None:
        record = {"scene": scene.name, "text": scene.line, **scene.facts}
        printer.item(record, f"{scene.name:>10}  {scene.line}")

    async def work() -> None:
        took_s = time.perf_counter() - began
        show(demo_tour.up(running, took_s))
        async for scene in demo_tour.scenes(running):
            show(scene)
        _suggest(printer, place, ("status", "sub 'demo/>'", "pub demo/hello world"), stay=stay)
        if stay:
            await demo_tour.tick(running)

    cli_command.run(process.run(running, work, stopping=printer.stopping))


def _suggest(printer: output.Printer, place: home.Home, commands: Sequence[str], *, stay: bool) -> None:
    if not printer.for_people:
        return
    muster = cli_command.program()
    if stay:
        option = f"--home {cli_command.display_path(place.root)}"
        lines = [
            "It stays up until Ctrl-C. What to try next, in another terminal:",
            *(f"  {muster} {command} {option}" for command in commands),
        ]
    else:
        lines = ["What to try next, a domain of your own:", f"  {muster} init && {muster} up --detach"]
    sys.stdout.write("\n".join(["", *lines, ""]))
    sys.stdout.flush()


def _worm(invocation: cli_command.Invocation, place: home.Home, fleet: int, *, stay: bool) -> None:
    import asyncio

    from muster.app import domain, process
    from muster.app import settings as app_settings
    from muster.demo import outbreak, scenario, worm

    _expect_spark()
    printer = invocation.printer
    wishes = scenario.ScenarioOptions(
        plan=worm.WormPlan(servers=fleet),
        farms=2 if fleet <= 20_000 else 4,
        period_s=5.0 if fleet <= 20_000 else 10.0,
        start_s_max=240.0 + fleet / 100,
        contain_s_max=300.0 + fleet / 200,
    )
    settings = _fresh(place, scenario.flags(place.root, wishes))
    scenario.prepare(place.root)
    if printer.for_people:
        printer.note(
            f"starting {wishes.brokers} brokers, 2 managers and Spark in "
            f"{cli_command.display_path(place.root)}"
        )
    running = domain.Domain(settings, parts=app_settings.components(settings))

    def show(name: str, line: str, facts: Mapping[str, Any]) -> None:
        printer.item({"scene": name, "text": line, **facts}, f"{name:>10}  {line}")

    async def work() -> None:
        ports = ", ".join(url.rpartition(":")[2] for url in running.servers)
        line = f"up: {len(running.servers)} brokers, on ports {ports} of this machine"
        show("domain", line, {"servers": list(running.servers)})
        await _show_dashboard(running, show)
        async with outbreak.Outbreak(running, wishes, show) as story:
            summary = await story.run()
            _summarise(printer, summary)
            _suggest(printer, place, ("top", "get --managers", "alert list", "audit"), stay=stay)
            if stay:
                await asyncio.get_running_loop().create_future()

    cli_command.run(process.run(running, work, stopping=printer.stopping))


def _expect_spark() -> None:
    """Complain now, not when the fleet waits for it."""
    import importlib.util
    import tempfile

    from muster.pipeline.source import java_runtime

    tour = "`muster demo` alone shows what needs no Spark"
    if importlib.util.find_spec("pyspark") is None:
        raise errors.MissingDependency(
            "the worm's story needs Spark, which is not installed",
            hint=f"pip install 'muster-fabric[spark]'; {tour}",
        )
    with tempfile.TemporaryDirectory() as folder:
        java_runtime.find(Path(folder))


async def _show_dashboard(running: domain.Domain, show: Callable[..., None]) -> None:
    import asyncio

    from muster.app.components import web

    with contextlib.suppress(errors.NotFound):
        url = running.part(web.WebComponent).url
        if url is not None:
            password = await asyncio.to_thread(web.set_password, running.trust)
            line = f"{url}  (log in as {web.ADMINISTRATOR}, password {password})"
            show("dashboard", line, {"url": url, "password": password})


def _summarise(printer: output.Printer, summary: outbreak.OutbreakSummary) -> None:
    from dataclasses import asdict

    found = summary
    record = {"scene": "summary", **asdict(found), "saved": found.saved}
    lines = [
        "",
        f"to detect     {found.detect_s:6.1f} s   from the worm's release to Spark's alert",
        f"to notify     {found.notify_s:6.1f} s   from the alert to the first server that accepted it",
        f"to contain    {found.contain_s:6.1f} s   from the release until nothing spreads",
        f"to heal       {found.heal_s:6.1f} s   until every server is patched and reported so",
        f"infected      {found.fallen:6,} of {found.servers:,} servers; "
        f"without Muster {found.unhindered:,}: {found.saved:,} saved",
        f"commands      {found.commands:6,}, accepted {found.deliveries:,} times, "
        f"carried out {found.operations:,} times",
        f"missed        {found.not_done:6,}, repeated {found.repeated:,}, "
        f"dropped {found.dropped:,} messages or reports",
        f"reports       {found.reports:6,} taken in by Spark",
        f"forged        {found.forged_reached:6,} servers obeyed the impostor",
        f"killed        {', '.join(found.killed) or 'nothing'}; {found.failovers:,} servers changed managers",
    ]
    printer.item(record, "\n".join(lines))
