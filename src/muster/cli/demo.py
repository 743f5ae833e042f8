"""``muster demo``: a domain on this machine, at work, in ten seconds."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from muster.cli import base

if TYPE_CHECKING:
    from muster.app import catalogue, home
    from muster.cli import output

HOME = Path(".muster") / "demo"
_SETTINGS = """\
# Made by `muster demo`, which also removes it: keep nothing of your own in this folder.
[domain]
name = "demo"
data_dir = "."
"""


@click.command(
    cls=base.Command,
    examples=[
        ("muster demo", "leaves the domain up until Ctrl-C"),
        ("muster demo --once", "stops by itself, as it does without a terminal"),
    ],
)
@click.option("--once", is_flag=True, help="Stop when everything has been shown.")
@base.pass_invocation
def demo(invocation: base.Invocation, once: bool) -> None:
    """Start a domain on this machine and show it at work.

    Makes a fresh home in ./.muster/demo (or where --home says), on free ports of loopback. What an earlier
    demo left there is removed.
    """
    from muster.app import home

    place = home.Home.find(invocation.home or HOME)
    settings = _fresh(place)
    stay = not once and sys.stdout.isatty() and sys.stdin.isatty()
    _play(invocation, place, settings, stay=stay)


def _fresh(place: home.Home) -> catalogue.Settings:
    """A new home in the place of an earlier demo's; anything else that is there is left alone."""
    import shutil

    from muster.app import catalogue, home
    from muster.core import errors, settings

    if place.settings_file.exists() and place.settings_file.read_text() == _SETTINGS:
        with home.Folder(place.root / "demo").hold():
            pass  # refused while an earlier demo still runs
        shutil.rmtree(place.root)
    elif place.root.exists() and any(place.root.iterdir()):
        raise errors.AlreadyExists(
            f"{place.root} is there, and not from a demo", hint="name another folder with --home"
        )
    place.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.settings_file.write_text(_SETTINGS)
    return settings.load(catalogue.Settings, file=place.settings_file)


def _play(invocation: base.Invocation, place: home.Home, settings: catalogue.Settings, *, stay: bool) -> None:
    from muster.app import catalogue, demo, domain, process

    printer = invocation.printer
    if printer.for_people:
        printer.note(f"starting a domain in {base.shown(place.root)}")
    began = time.perf_counter()
    running = domain.Domain(settings, parts=catalogue.parts(settings))

    def show(scene: demo.Scene) -> None:
        record = {"scene": scene.name, "text": scene.line, **scene.facts}
        printer.item(record, f"{scene.name:>10}  {scene.line}")

    async def work() -> None:
        took_s = time.perf_counter() - began
        show(demo.up(running, took_s))
        async for scene in demo.scenes(running):
            show(scene)
        _suggest(printer, place, stay=stay)
        if stay:
            await demo.tick(running)

    base.run(process.run(running, work, stopping=printer.stopping))


def _suggest(printer: output.Printer, place: home.Home, *, stay: bool) -> None:
    if not printer.for_people:
        return
    muster, option = base.program(), f"--home {base.shown(place.root)}"
    if stay:
        lines = [
            "It stays up until Ctrl-C. What to try next, in another terminal:",
            f"  {muster} status {option}",
            f"  {muster} sub 'demo/>' {option}",
            f"  {muster} pub demo/hello world {option}",
        ]
    else:
        lines = [f"What to try next: {muster} up --detach {option} && {muster} status {option}"]
    sys.stdout.write("\n".join(["", *lines, ""]))
    sys.stdout.flush()
