"""``muster pipeline``: the Spark job at the root of the monitoring hierarchy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection
from muster.cli.domain import config
from muster.cli.monitoring import history
from muster.core import units

if TYPE_CHECKING:
    from muster.pipeline import cost_fit, protocol


@click.group(cls=command.MusterGroup, examples=[("muster pipeline status --follow", "")])
def pipeline() -> None:
    """Show the progress of the Spark pipeline, and stop it.

    `muster up` runs it if pipeline.enabled is set, and `muster run pipeline` beside a domain. After a crash
    it continues where it stopped, without loss or duplicates.
    """


@pipeline.command(examples=[("muster pipeline status", ""), ("muster pipeline status --follow", "live")])
@click.option("-f", "--follow", is_flag=True, help="Print a line for each batch until Ctrl-C.")
@connection.options
@command.pass_invocation
def status(invocation: command.Invocation, follow: bool, to: connection.ConnectionOptions) -> None:
    """Show the progress of the pipeline: rows per second, batch time, lag, state size, rejected reports."""

    async def work() -> None:
        from muster.pipeline import client

        async with await connection.connect(invocation, to) as bus:
            ask = client.PipelineClient(bus)
            progress = await ask.progress()
            if not follow:
                facts = _facts(progress)
                if invocation.printer.for_people and progress.batch < 0:  # the rest is about the last batch
                    facts = {name: facts[name] for name in ("state", "driver", "epoch", "standbys", "reason")}
                invocation.printer.facts(facts)
                return
            _show(invocation, progress)
            async for progress in ask.follow_progress():
                _show(invocation, progress)

    command.run(work())


@pipeline.command(examples=[("muster pipeline stop", "")])
@connection.options
@command.pass_invocation
def stop(invocation: command.Invocation, to: connection.ConnectionOptions) -> None:
    """Stop the pipeline after the current batch."""
    from muster.pipeline import client

    connection.call(invocation, to, lambda bus: client.PipelineClient(bus).stop())
    invocation.printer.done({"stopping": True}, "the pipeline will stop after the current batch")


@pipeline.command(
    examples=[
        (
            "muster pipeline replay \"severity = 'critical'\" --address \"zone = 'z1'\"",
            "the machines it would have reached",
        ),
        ('muster pipeline replay "receiver.cpu_percent > 50" --last 7d', ""),
        ('muster pipeline replay "alert AND threat_level >= 4" --notifications', "over past notifications"),
    ]
)
@click.argument("policy")
@click.option(
    "--address",
    metavar="PREDICATE",
    help="Predicate over receivers (default: all; with --notifications: the address of each event).",
)
@command.duration("--last", None, "Only events of the last DURATION, such as 2h or 7d.")
@click.option(
    "--notifications",
    is_flag=True,
    help="Use the events and receivers' states that the notifiers recorded.",
)
@history.root_option
@connection.options
@command.pass_invocation
def replay(
    invocation: command.Invocation,
    policy: str,
    address: str | None,
    last_s: float | None,
    notifications: bool,
    root: str | None,
    to: connection.ConnectionOptions,
) -> None:
    """Show which receivers a notification policy would have selected in the past.

    Evaluates the policy with Spark on the alerts and machines' states of the history, or on notifications.
    """
    import time

    from muster.analyses import rule_replay

    from_ms = int((time.time() - last_s) * 1000) if last_s else None
    if notifications:
        _replay_notifications(invocation, policy, address, from_ms, to)
        return
    location = history.resolve_root(invocation, root)
    with history.spark_session(invocation) as spark:
        result = rule_replay.replay(spark, location, policy, address=address or "TRUE", from_ms=from_ms)
    if invocation.printer.for_people:
        invocation.printer.note(
            f"{result.events} events would have reached {result.receivers:,} machines, "
            f"{result.deliveries:,} times in total"
        )
        rows = [
            {name: getattr(machine, name) for name in machine.__struct_fields__} for machine in result.reached
        ]
        invocation.printer.rows(rows, ("at", "state", "rule", "about", "receivers"))
        return
    import msgspec

    invocation.printer.facts(msgspec.to_builtins(result))


def _replay_notifications(
    invocation: command.Invocation,
    policy: str,
    address: str | None,
    from_ms: int | None,
    to: connection.ConnectionOptions,
) -> None:
    import datetime

    import msgspec

    from muster.app.operations import policy_replay
    from muster.core import errors

    resolved = connection.resolve(invocation, to)
    if not resolved.servers:
        raise errors.InvalidInput("Spark does not use a locator: name brokers with --server")
    access = {"servers": ",".join(resolved.servers)}
    access |= {"credentials": str(resolved.creds)} if resolved.creds else {}
    access |= {"ca": str(resolved.ca)} if resolved.ca else {}
    words = connection.call(invocation, to, policy_replay.load_vocabulary)
    with history.spark_session(invocation) as spark:
        result = policy_replay.replay_notifications(
            spark, access, words, policy, address=address, from_ms=from_ms
        )
    if not invocation.printer.for_people:
        invocation.printer.facts(msgspec.to_builtins(result))
        return
    invocation.printer.note(
        f"{result.events} events would have reached {result.receivers:,} receivers, "
        f"{result.deliveries:,} times in total; actual deliveries: {result.reached:,}"
    )
    rows = [
        {
            **msgspec.to_builtins(delivery),
            "at": datetime.datetime.fromtimestamp(delivery.at_ms / 1000, datetime.UTC).isoformat(
                timespec="milliseconds"
            ),
        }
        for delivery in result.notifications
    ]
    invocation.printer.rows(rows, ("at", "type", "sender", "reached", "would_reach"))


@pipeline.command(examples=[("muster pipeline demand", ""), ("muster pipeline demand --last 7d", "")])
@click.option("--prefix", default="reads.", show_default=True, help="Prefix of the metrics' names.")
@command.duration("--last", None, "Only reports of the last DURATION, such as 2h or 7d.")
@history.root_option
@command.pass_invocation
def demand(invocation: command.Invocation, prefix: str, last_s: float | None, root: str | None) -> None:
    """Show the demand for contexts by zone, and where replicas would be close to their readers.

    Information nodes report how often their clients read each context, as metrics reads.KEY_s (a rate per
    second) of their machine's sensor. Services may report reads.KEY (a count per period) or reads.KEY_s
    themselves. Spark adds them up.
    """
    import time

    import msgspec

    from muster.analyses import rule_replay

    from_ms = int((time.time() - last_s) * 1000) if last_s else None
    location = history.resolve_root(invocation, root)
    with history.spark_session(invocation) as spark:
        placements = rule_replay.demand(spark, location, prefix=prefix, from_ms=from_ms)
    invocation.printer.rows(
        [msgspec.to_builtins(placement) for placement in placements],
        ("key", "total", "place_in", "by_zone"),
        empty="no demand was reported",
    )


@pipeline.command(
    examples=[
        ("muster pipeline size --machines 10000000", ""),
        ("muster pipeline size --machines 1000000 --groups 5000 --hours 12", ""),
    ]
)
@click.option("--machines", type=command.CountParam(1, 10**9), required=True, help="Machines of the fleet.")
@click.option(
    "--groups", type=command.CountParam(1, 10**9), help="Groups of the fleet (default: 20 machines each)."
)
@command.duration("--period", "10s", "Interval between the reports of a machine.")
@click.option(
    "--hours",
    type=command.AmountParam(24 * 365),
    default=4.0,
    show_default=True,
    help="Hours of reports that the stream holds.",
)
@click.option(
    "--replicas", type=command.CountParam(1, 5), default=3, show_default=True, help="Replicas of the stream."
)
@command.duration("--trigger", "10s", "Trigger interval of Spark.")
@command.duration("--window", "10s", "Length of the windows.")
@click.option(
    "--shards",
    type=command.CountParam(0, 4096),
    default=0,
    show_default=True,
    help="Parts of the fleet's state; 0: as many as are needed.",
)
@command.pass_invocation
def size(
    invocation: command.Invocation,
    machines: int,
    groups: int | None,
    period_s: float,
    hours: float,
    replicas: int,
    trigger_s: float,
    window_s: float,
    shards: int,
) -> None:
    """Show how large streams, Spark's cluster and the history must be for a fleet.

    The arithmetic uses costs that the benchmarks measured with a realistic fleet, on one core of their
    machine; `docs/guides/pipeline-cluster.md` explains it.
    """
    from muster.pipeline import cluster_size

    needed = cluster_size.cluster_size(
        machines,
        groups or max(1, machines // 20),
        period_s=period_s,
        trigger_s=trigger_s,
        window_s=window_s,
        hours=hours,
        replicas=replicas,
        shards=shards,
    )
    invocation.printer.facts(needed)


@pipeline.command(examples=[("muster pipeline fit", "the cost of a batch and of a report")])
@command.duration("--period", "10s", "Interval between the reports of a machine.")
@command.pass_invocation
def fit(invocation: command.Invocation, period_s: float) -> None:
    """Fit the cost of a batch and of a report to measured batches, and print the quality of the fit.

    The largest fleet is printed only if the fit allows a forecast. `muster capacity` uses the fitted costs.
    """
    import msgspec

    fitted = load_fit(invocation)
    problem = fitted.problem()
    invocation.printer.facts(
        {
            **msgspec.to_builtins(fitted),
            "usable": not problem,
            "machines_max": None if problem else int(fitted.machines(period_s)),
            "problem": problem or None,
        }
    )


def load_fit(invocation: command.Invocation) -> cost_fit.CostFit:
    """The costs of this home's pipeline. `errors.InvalidInput` if there are too few batches."""
    from muster.pipeline import cost_fit

    settings = config.load(invocation)
    folder = settings.pipeline.state_folder(settings.domain.folder)
    batches = cost_fit.read(folder / cost_fit.PROGRESS_NAME)
    return cost_fit.fit(batches, trigger_s=settings.pipeline.trigger_s)


def _facts(progress: protocol.BatchProgress) -> dict[str, Any]:
    import msgspec

    values: dict[str, Any] = msgspec.to_builtins(progress)
    values.pop("kind", None)
    known = {**{name: getattr(progress, name) for name in progress.__struct_fields__}, **values}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in known.items()}


def _show(invocation: command.Invocation, progress: protocol.BatchProgress) -> None:
    facts = _facts(progress)
    counts = ", ".join(f"{name} {count}" for name, count in progress.counts.items())
    invocation.printer.item(
        facts,
        f"batch {progress.batch}: {progress.rows:,} reports ({progress.rows_s:,.0f}/s) in "
        f"{progress.batch_s:.1f} s, {progress.lag_messages} messages behind, {progress.machines:,} machines, "
        f"state {units.rounded_size(progress.state_bytes)}{'; ' + counts if counts else ''}"
        if progress.state == "running"
        else f"{progress.state}: {progress.reason}",
    )
