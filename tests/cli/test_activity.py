"""Commands are recorded in the activity log: done or refused, while the domain is up or down."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

import muster
from muster.app import home, settings
from muster.app.operations import audit
from muster.bus.memory import network
from muster.cli import command as cli_command
from muster.core import errors, leaky_buckets, messages
from muster.supervision import tasks
from muster.testing import child_process
from tests.cli import driver
from tools.reference import cli as reference

WAIT_S = 60.0

#: Their registry writes down what they do.
RECORDED_BY_THE_SERVICE = {
    *("agent approve", "agent token", "chaos kill", "pipeline stop"),
    *("alert ack", "alert resolve", "alert maintenance", "alert silence", "alert test", "alert unsilence"),
    "notify define",
    *("broker link", "broker start", "broker stop", "broker unlink", "message move", "message purge"),
    "agent forget",
    "fleet forget",
    "apply",
    "delete",
    "drain",
    "exec",
    *("job run", "rebalance"),
    *("rollout abort", "rollout pause", "rollout resume", "rollout start", "rollout undo"),
    "secret delete",
    "secret set",
}
#: They look, carry messages, are processes of their own, or change only the caller's own files.
NO_ACTS = {
    "agent orphans",
    *("agent", "agent waiting", "alert list", "alert silences", "alert watch", "activity", "authority list"),
    *(
        "broker list",
        "join",  # the machine that admits it records it
        "leave",  # the domain records the removal
        "machine list",
        "machine token",  # recorded by the domain
        "capacity",
        "chaos list",
        "completion",
        "config print",
    ),
    *("config validate", "creds list", "creds show", "demo", "describe", "diff", "doctor"),
    *("history", "history export", "history search", "message scheduled", "schema", "sql", "systemd"),
    *("get", "inform find", "inform get", "inform history"),
    *("inform nodes", "inform service find", "inform service show", "inform session status"),
    *("inform watch", "inform where", "init", "logs", "message browse", "message dead-letters"),
    *(
        "message queues",
        "message receive",
        "message send",
        "message udp receive",
        "message udp send",
        "message subscriptions",
        "notify check",
    ),
    *("notify explain", "notify listen", "notify models", "notify receivers", "notify who"),
    *(
        "pipeline demand",
        "pipeline fit",
        "pipeline replay",
        "pipeline size",
    ),
    *("pipeline status", "plan", "profile add", "profile list", "profile delete", "profile show"),
    *("profile use", "pub", "report capacity", "report disks", "report group", "report node"),
    *("report outliers", "report system", "request", "rollout history", "rollout list"),
    *("rollout status", "job list", "job history"),
    *("secret list", "sensor", "status"),
    *("simulate sensors", "sub", "targets", "top", "up", "version", "watch"),
    *("run", "web logins", "web token list"),
}


def test_every_command_is_known_to_act_or_not_to():
    acting: set[str] = set()
    silent: set[str] = set()
    for context in reference.walk():
        command, name = context.command, " ".join(context.command_path.split()[1:])
        if isinstance(command, click.Group) and not command.invoke_without_command:
            continue
        assert isinstance(command, cli_command.MusterCommand)
        (acting if command.acts else silent).add(name)
        if command.acts:
            names = {parameter.name or "" for parameter in command.params}
            command.acts[1].format(**dict.fromkeys(names, ""))  # names only arguments that there are
    assert silent == RECORDED_BY_THE_SERVICE | NO_ACTS
    assert len(acting) > 15


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home with activities from before the domain's first run."""
    made = tmp_path_factory.mktemp("activity") / "home"
    assert driver.quick("init", "--port", "0", home=made).code == 0
    assert driver.quick("creds", "issue", "early", home=made).code == 0
    answer = driver.run("up", "--detach", "--set", "web.enabled=false", home=made)
    assert answer.code == 0, answer.err
    yield made
    assert driver.quick("down", home=made).code == 0


def latest_record(place: Path, what: str, *filters: str) -> dict[str, Any]:
    """The newest act of this kind; notes in a file are taken over a moment later."""

    def look() -> Any:
        actual = driver.quick("activity", "--what", what, *filters, "-o", "json", home=place)
        assert actual.code == 0, actual.err
        return actual.json()

    newest: dict[str, Any] = driver.wait_until(look)[-1]
    return newest


def test_acts_on_the_home_are_taken_over_also_those_from_before_the_start(place):
    record = latest_record(place, "issue", "--target", "early")
    assert (record["who"], record["target"], record["outcome"]) == ("admin", "early as user", "done")
    assert record["details"]["interface"] == "cli"
    assert driver.quick("web", "password", "ann", home=place, stdin="a long secret\n").code == 0
    assert latest_record(place, "set-login", "--target", "ann")["outcome"] == "done"
    assert driver.quick("web", "forget", "ann", home=place).code == 0
    assert latest_record(place, "remove-login")["target"] == "ann"
    refused = driver.quick("creds", "revoke", "nobody", home=place)
    assert refused.code == errors.NotFound.exit_code
    record = latest_record(place, "revoke", "--target", "nobody")
    assert (record["outcome"], "nobody" in record["why"]) == ("refused", True)
    notes = place / "local" / audit.FOLDER
    driver.wait_until(lambda: not list(notes.glob("*.json")))


ACTS = [
    (("inform", "put", "printers/3", "colour"), "put-context", "printers/3", "done"),
    (("inform", "delete", "printers/3"), "delete-context", "printers/3", "done"),
    (("inform", "delete", "never-there"), "delete-context", "never-there", "refused"),
    (("inform", "session", "begin"), "begin-session", "-", "done"),
    (("message", "purge", "dead-letters"), "purge", "queue:dead-letters", "done"),
    (("authority", "grant", "nw", "_trust_level=4"), "grant", "nw: _trust_level=4", "done"),
    (("notify", "send", "--event", "alert"), "notify", "alert to TRUE", "done"),
    (("broker", "stop", "no-such"), "broker-stop", "no-such", "refused"),
    (("chaos", "kill", "no-such"), "kill", "no-such", "refused"),
    (("agent", "token", "host-b"), "enrolment-token", "host-b", "done"),
]


@pytest.mark.parametrize(("line", "what", "target", "outcome"), ACTS, ids=lambda value: str(value)[:40])
def test_acts_over_the_bus_are_written_down_at_once(place, line, what, target, outcome):
    answer = driver.quick(*line, home=place)
    assert (answer.code == 0) == (outcome == "done"), answer.err
    assert "activity log" not in answer.err
    actual = driver.quick("activity", "--what", what, "--target", target, "-o", "json", home=place).json()
    assert [row["outcome"] for row in actual] == [outcome]
    assert actual[0]["who"] == "admin"


async def test_following_shows_what_was_and_then_each_new_act(place):
    following = await child_process.start_muster(
        "activity", "--follow", "--what", "set-login", env={"MUSTER_HOME": str(place)}
    )
    async with following:
        for name in ("berta", "carl"):  # however it falls with the start of the follower, each comes once
            made = await asyncio.to_thread(
                driver.quick, "web", "password", name, home=place, stdin="a long secret\n"
            )
            assert made.code == 0, made.err
            await following.line(f"admin  set-login  {name}  done", timeout_s=WAIT_S)


async def test_no_caller_acts_under_another_name(place, tmp_path):
    """The broker's word counts, not the message's; rubbish is refused."""
    issued = await asyncio.to_thread(
        driver.quick, "creds", "issue", "mallory", "--to", tmp_path / "mallory.creds", home=place
    )
    assert issued.code == 0, issued.err
    running = home.DomainFolder(place / "local").running()
    assert running is not None
    async with await muster.connect(running.servers, creds=tmp_path / "mallory.creds") as bus:
        padding = {f"detail-{number}": "x" * 4096 for number in range(60)}
        line = audit.audit_entry("admin", "purge", "queue:innocent", why="y" * 4096)
        await audit.publish_entry(
            bus, msgspec.structs.replace(line, at_ms=1, details={**line.details, **padding})
        )
        answer = await bus.request("muster.audit.from.mallory.act", b"rubbish")
        assert b"malformed" in answer.data
        with pytest.raises(errors.InvalidInput, match="cannot be a name"):
            await audit.publish_entry(bus, messages_of("two words"))
    actual = await asyncio.to_thread(
        driver.quick, "activity", "--target", "innocent", "-o", "json", home=place
    )
    (stored,) = actual.json()
    assert stored["who"] == "mallory"
    assert not stored["at"].startswith("1970"), "it was dated back"
    assert set(stored["details"]) == {"interface", "user"}
    assert len(stored["why"]) <= audit.TEXT_MAX


async def test_one_identity_cannot_push_out_the_history_by_the_number_of_its_records(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "ENTRY_BUDGET", leaky_buckets.BucketBudget(3, 3600.0))
    net = network.SimulatedNetwork(seed=1)
    async with await net.connect("domain") as own, await net.connect("chatty") as bus:
        supervisor = tasks.TaskSupervisor("audit")
        context = types.SimpleNamespace(
            bus=own,
            folder=types.SimpleNamespace(root=tmp_path),
            settings=settings.Settings(),
            tasks=supervisor,
        )
        part = audit.AuditComponent()
        await part.start(context)  # type: ignore[arg-type]
        line = audit.audit_entry("chatty", "purge", "queue:much")
        for number in range(3):
            await audit.publish_entry(bus, msgspec.structs.replace(line, id=f"{number}"))
        for _ in range(5):
            with pytest.raises(errors.Overloaded, match="only counted"):
                await audit.publish_entry(bus, line)
        await part.stop()
        await supervisor.close()
        stream = await own.open_stream(messages.DECISIONS_STREAM)
        actual = [messages.decode(message.data, messages.Decision) async for message in stream.read(1)]
    assert [(record.who, record.what) for record in actual] == [
        *[("chatty", "purge")] * 3,
        ("chatty", "not-recorded"),
    ]
    assert actual[-1].details == {"count": "5"}


async def test_failed_logins_leave_a_bounded_number_of_records_and_a_count(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "FAILED_LOGINS", leaky_buckets.BucketBudget(3, 3600.0))
    async with audit.FailedLogins(tmp_path, "soap") as failed:
        for number in range(20):
            await failed(f"guess{number}", "10.0.0.1")
    actual = [
        messages.decode(path.read_bytes(), messages.Decision)
        for path in (tmp_path / audit.FOLDER).glob("*.json")
    ]
    assert sorted(record.who for record in actual) == ["-", "guess0", "guess1", "guess2"]
    assert [record.details.get("count") for record in actual if record.who == "-"] == ["17"]


def messages_of(what: str) -> messages.Decision:
    return messages.Decision(id="1", who="mallory", what=what, target="x", why="y", at_ms=1)


def test_a_note_that_is_none_is_passed_over_and_the_rest_is_taken(tmp_path):
    """Files of the folder are read in the order in which they were written."""
    for what in ("first", "second"):
        audit.append_entry(tmp_path, audit.audit_entry("admin", what, "x"))
    (tmp_path / audit.FOLDER / ".draft").write_text("half")
    whats = [
        messages.decode(path.read_bytes(), messages.Decision).what
        for path in audit._notes(tmp_path / audit.FOLDER)
    ]
    assert whats == ["first", "second"]
