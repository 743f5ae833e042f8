"""``muster pipeline``: the Spark job at the root of the monitoring hierarchy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from muster.cli import base, connection, output
from muster.cli import config as config_

if TYPE_CHECKING:
    from muster.pipeline import protocol


@click.group(cls=base.Group, examples=[("muster pipeline run", "")])
def pipeline() -> None:
    """Run Spark over the fleet's reports, and see how it fares."""


@pipeline.command(
    examples=[
        ("muster pipeline run", "for the running domain of this home; Ctrl-C ends it after its batch"),
        ("muster pipeline run --set pipeline.master=spark://10.0.0.5:7077", "on a cluster"),
        ("muster pipeline run --set pipeline.rules=./rules.yaml", "with alert rules"),
    ]
)
@config_.set_option
@base.pass_invocation
def run(invocation: base.Invocation, overrides: tuple[str, ...]) -> None:
    """Run the pipeline in front, with its progress.

    Reads the stream of reports, rolls it up, raises alerts and writes the history. It may be killed at any
    moment: the next run goes on where this one stopped, and nothing is lost or doubled.
    """
    from muster.app import home, identities
    from muster.app import pipeline as pipeline_
    from muster.core import errors
    from muster.pipeline import run as run_

    settings = config_.load(invocation, overrides)
    folder = home.Folder(settings.domain.folder)
    running = folder.running()
    if running is None:
        raise errors.Unavailable(
            f"the domain {settings.domain.name} is not running", hint="start it with `muster up --detach`"
        )
    told = pipeline_.options(settings.pipeline, folder, identities.open_(settings), running)
    options = run_.Options(**told)
    invocation.printer.note("starting Spark; Ctrl-C ends the pipeline after the batch it works on")
    base.run(run_.run(options, on_progress=lambda progress: _show(invocation, progress)))


@pipeline.command(examples=[("muster pipeline status", ""), ("muster pipeline status --follow", "live")])
@click.option("-f", "--follow", is_flag=True, help="Go on with a line for each batch.")
@connection.options
@base.pass_invocation
def status(invocation: base.Invocation, follow: bool, to: connection.Options) -> None:
    """Say how the pipeline fares: rows a second, batch time, lag, state, what was refused and why."""

    async def work() -> None:
        from muster.pipeline import client

        async with await connection.connect(invocation, to) as bus:
            ask = client.Client(bus)
            progress = await ask.progress()
            if not follow:
                invocation.printer.facts(_facts(progress))
                return
            _show(invocation, progress)
            async for progress in ask.follow_progress():
                _show(invocation, progress)

    base.run(work())


@pipeline.command(examples=[("muster pipeline stop", "")])
@connection.options
@base.pass_invocation
def stop(invocation: base.Invocation, to: connection.Options) -> None:
    """Ask the pipeline to end after the batch it works on."""

    async def work() -> None:
        from muster.pipeline import client

        async with await connection.connect(invocation, to) as bus:
            await client.Client(bus).stop()

    base.run(work())
    invocation.printer.done({"stopping": True}, "the pipeline ends after the batch it works on")


def _facts(progress: protocol.Progress) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(progress)
    found.pop("kind", None)
    return {**{name: getattr(progress, name) for name in progress.__struct_fields__}, **found}


def _show(invocation: base.Invocation, progress: protocol.Progress) -> None:
    found = _facts(progress)
    counts = ", ".join(f"{name} {count}" for name, count in progress.counts.items())
    invocation.printer.item(
        found,
        f"batch {progress.batch}: {progress.rows:,} reports ({progress.rows_s:,.0f}/s) in "
        f"{progress.batch_s:.1f} s, {progress.lag_messages} messages behind, {progress.machines:,} machines, "
        f"state {output.size(progress.state_bytes)}{'; ' + counts if counts else ''}"
        if progress.state == "running"
        else f"{progress.state}: {progress.reason}",
    )
