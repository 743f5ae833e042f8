"""The command as people use it: real processes, one after another and beside each other."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import muster
from muster.core import errors
from tests.cli import driver

WAIT_S = 60.0

pytestmark = pytest.mark.timeout(300)  # whole lives of domains, on machines that may be busy


@contextlib.contextmanager
def started(*arguments: str | Path, home: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that goes on beside the test, and not beyond it."""
    with subprocess.Popen(
        driver.command_line(*arguments),
        env=driver.environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], WAIT_S)[0], "it says nothing"
    return process.stdout.readline()


def brokers_of(pid: int) -> list[psutil.Process]:
    return [child for child in offspring(pid) if "nats-server" in child.name()]


def offspring(pid: int) -> list[psutil.Process]:
    """All that a domain's process started, and what those started."""
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    return not alive


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Path]:
    """A home on free ports; whatever was started in it is stopped at the end."""
    home = driver.init(tmp_path / "home")
    yield home
    driver.quick("down", "--force", home=home)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home whose domain runs, shared by tests that only use it."""
    home = driver.init(tmp_path_factory.mktemp("shared") / "home")
    answer = driver.run("up", "--detach", home=home)
    assert answer.code == 0, answer.err
    yield home
    assert driver.run("down", home=home).code == 0


def heard_by(listener: subprocess.Popen[str], *publish: str, home: Path) -> str:
    """What a listener says when it is published to; again and again until it listens."""
    assert listener.stdout is not None
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        answer = driver.quick("pub", *publish, home=home)
        assert answer.code == 0, answer.err
        if select.select([listener.stdout], [], [], 0.2)[0]:
            return next_line(listener)
    raise AssertionError("nothing was heard")


# -- a domain


def test_status_shows_processes_and_places(up):
    status = driver.quick("status", "-o", "json", home=up).json()
    assert (status["state"], status["ready"], status["domain"]) == ("running", True, "local")
    for key in ("home", "settings", "keys", "data", "logs"):
        assert Path(status[key]).exists(), key
    assert [row["name"] for row in status["brokers"]] == ["local-1"]
    assert {"disk", "log files"} <= {budget["name"] for budget in status["budgets"]}
    people = driver.run("status", home=up)
    assert people.code == 0
    assert str(up) in people.out
    assert status["brokers"][0]["url"] in people.out


def test_status_of_a_domain_that_does_not_run(fresh):
    answer = driver.quick("status", "-o", "json", home=fresh)
    assert answer.code == errors.Unavailable.exit_code
    assert answer.json()["state"] == "stopped"


def test_a_second_up_is_refused_and_names_the_running_process(up):
    pid = driver.quick("status", "-o", "json", home=up).json()["pid"]
    for arguments in (("up",), ("up", "--detach")):
        answer = driver.run(*arguments, home=up)
        assert answer.code == errors.AlreadyExists.exit_code
        assert f"pid {pid}" in answer.err
        assert "muster down" in answer.err


def test_init_leaves_a_home_alone_that_is_there(fresh):
    before = (fresh / "muster.toml").read_text()
    answer = driver.quick("init", "--name", "other", home=fresh)
    assert answer.code == errors.AlreadyExists.exit_code
    assert (fresh / "muster.toml").read_text() == before


@pytest.mark.parametrize(("signal_", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 0)])
def test_in_front_until_a_signal_then_drained_and_nothing_left(fresh, signal_, code):
    with started("up", home=fresh) as process:
        assert "is up: nats://" in next_line(process)
        brokers = brokers_of(process.pid)
        assert brokers
        process.send_signal(signal_)
        out, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == code, err
        assert "stopping" in err
        assert "Traceback" not in out + err
    assert gone(brokers)


def test_a_second_ctrl_c_forces_and_leaves_no_broker(fresh):
    with started("up", home=fresh) as process:
        next_line(process)
        started_by_it = offspring(process.pid)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
        assert process.returncode in (0, 130), err  # whichever came first: the end, or the second one
    assert gone(started_by_it)


def test_killed_and_started_again_with_its_data(fresh):
    """kill -9: nothing is left over, no lock is in the way, and what was acknowledged is there."""
    answer = driver.run("up", "--detach", "-o", "json", home=fresh)
    assert answer.code == 0, answer.err
    pid = answer.json()["pid"]
    assert driver.quick("creds", "issue", "alice", home=fresh).code == 0
    keep = ("pub", "log/a", "kept", "--stream", "log", "-o", "json")
    assert "hint: create it with --make-stream" in driver.quick(*keep[:-2], home=fresh).err
    stored = driver.quick(*keep, "--make-stream", home=fresh)
    assert stored.json()["sequences"] == [1], stored.err
    started_by_it = offspring(pid)
    os.kill(pid, signal.SIGKILL)
    assert gone(started_by_it)
    assert driver.quick("status", "-o", "json", home=fresh).json()["state"] == "stopped"
    again = driver.run("up", "--detach", home=fresh)
    assert again.code == 0, again.err
    stored = driver.quick(*keep, home=fresh)
    assert stored.json()["sequences"] == [2], stored.err
    assert "alice" in driver.quick("creds", "list", home=fresh).out
    assert driver.quick("down", home=fresh).out == "the domain local is stopped\n"
    assert driver.quick("down", home=fresh).out == "the domain local was not running\n"


def test_a_taken_port_is_named_also_when_detached(fresh):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments in (("up",), ("up", "--detach")):
            answer = driver.run(*arguments, "--set", f"bus.port={port}", home=fresh)
            assert answer.code == errors.Unavailable.exit_code
            assert answer.err.startswith("error: broker local-1: ")
            assert str(port) in answer.err
            assert "hint: " in answer.err


def test_down_says_what_it_waits_for(fresh: Path):
    assert driver.run("up", "--detach", home=fresh).code == 0
    pages = json.loads(driver.run("status", "-o", "json", home=fresh).out)["pages"]
    (manager,) = [page["pid"] for page in pages if page["process"] == "manager-1"]
    os.kill(manager, signal.SIGSTOP)
    answer = driver.run("down", "--timeout", "4s", home=fresh)
    with contextlib.suppress(ProcessLookupError):  # it was killed, because it did not stop
        os.kill(manager, signal.SIGCONT)
    assert driver.run("down", home=fresh).code == 0
    assert answer.code == errors.TimedOut.exit_code
    assert "did not stop within 4 s: it waits for " in answer.err


def test_a_home_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.touch()
    answer = driver.quick("init", "--home", file / "home")
    assert answer.code != 0
    assert str(file) in answer.err
    assert "Traceback" not in answer.err


def test_a_full_disk_is_reported_and_damages_nothing(small_disk):
    home = small_disk / "home"
    assert driver.quick("init", "--port", "0", home=home).code == 0
    filler = small_disk / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(32 << 20))
    answer = driver.quick("up", home=home)
    assert answer.code == errors.LimitExceeded.exit_code
    assert "no space left" in answer.err
    filler.unlink()
    with started("up", home=home) as process:
        assert "is up: nats://" in next_line(process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0


# -- messages


def test_publish_and_listen_across_processes(up):
    with started("sub", "Course/*/Session/>", "-n", "1", "-o", "json", home=up) as listener:
        line = heard_by(listener, "Course/CPS616/Session/HPJava", "room 4", "-H", "kind=note", home=up)
        assert listener.wait(WAIT_S) == 0
    message = json.loads(line)
    assert message["topic"] == "Course/CPS616/Session/HPJava"
    assert message["data"] == "room 4"
    assert message["headers"]["kind"] == "note"


def test_a_subscription_by_tags_and_a_predicate(up):
    where = "room > 3 AND kind = 'note'"
    with started("sub", "Session=HPJava,Course=*", "--where", where, "-n", "1", home=up) as listener:
        for room in (1, 2, 3):
            driver.quick("pub", "Course=CPS616,Session=HPJava", json.dumps({"room": room}), home=up)
        line = heard_by(listener, "Course=CPS616,Session=HPJava", '{"room": 4}', "-H", "kind=note", home=up)
        assert line == 'Course/CPS616/Session/HPJava  {"room": 4}\n'
        assert listener.wait(WAIT_S) == 0


async def publish_with_reply(home: Path, topic: str, reply: str) -> None:
    async with muster.open_async(home=home) as m:
        await m.bus.publish(f"topic.{topic}", b"", reply=reply)


def test_ask_and_answer_across_processes(up):
    with started("sub", "ping", "--reply", "pong", home=up) as answerer:
        deadline = time.monotonic() + WAIT_S
        answer = driver.run("request", "ping", "hello", home=up)
        while answer.code != 0 and time.monotonic() < deadline:
            answer = driver.quick("request", "ping", "hello", home=up)
        assert answer.out == "pong\n"
        assert next_line(answerer) == "ping  hello\n"
        asyncio.run(publish_with_reply(up, "ping", "elsewhere"))  # and the next request is answered
        assert driver.quick("request", "ping", "again", home=up).out == "pong\n"
        answerer.send_signal(signal.SIGINT)
        assert answerer.wait(WAIT_S) == 130


def test_a_request_without_a_responder(up):
    answer = driver.quick("request", "nobody/here", home=up)
    assert answer.code == errors.Unavailable.exit_code
    assert "there is no subscriber" in answer.err


def test_messages_that_do_not_come_in_time(up):
    answer = driver.quick("sub", "silence", "-n", "1", "--timeout", "0.2", home=up)
    assert answer.code == errors.TimedOut.exit_code
    assert driver.quick("sub", "silence", "--timeout", "0.2", home=up).code == 0


def test_lines_of_stdin_and_raw_subjects(up):
    with started("sub", "topic.lines", "--raw", "-n", "2", home=up) as listener:
        deadline = time.monotonic() + WAIT_S
        while listener.poll() is None and time.monotonic() < deadline:
            answer = driver.run("pub", "lines", "--lines", home=up, stdin="one\ntwo\n")
            assert answer.out == "published 2 messages, 6 bytes to lines\n"
        out, _ = listener.communicate(timeout=WAIT_S)
    assert {line.split("  ")[1] for line in out.splitlines()} <= {"one", "two"}


def test_a_topic_that_cannot_be_and_a_predicate_that_cannot_be_read(up):
    assert driver.quick("pub", "x" * 10_000, "y", home=up).code == errors.LimitExceeded.exit_code
    answer = driver.quick("sub", "a", "--where", "load >", home=up)
    assert answer.code == errors.ParseError.exit_code
    assert "^" in answer.err


# -- credentials


def test_issued_credentials_connect_and_revoked_ones_are_refused_with_a_reason(up, tmp_path):
    file = tmp_path / "bob.creds"
    issued = driver.quick("creds", "issue", "bob", "--to", file, "-o", "json", home=up)
    assert issued.json()["role"] == "user"
    assert file.stat().st_mode & 0o077 == 0
    status = driver.quick("status", "-o", "json", home=up).json()
    server, locator = status["servers"][0], status["locator"]
    assert driver.run("pub", "a", "b", "--server", server, "--creds", file, home=up).code == 0
    assert driver.quick("pub", "a", "b", "--locator", locator, "--creds", file, home=up).code == 0
    forbidden = driver.quick(
        "pub", "muster.bus.all.x", "b", "--raw", "--server", server, "--creds", file, home=up
    )
    assert forbidden.code == errors.Forbidden.exit_code
    assert "bob" in forbidden.err

    with started("sub", "a", "--server", server, "--creds", file, home=up) as listener:
        heard_by(listener, "a", "b", home=up)
        assert driver.quick("creds", "revoke", "bob", "-o", "json", home=up).json()["told_brokers"] is True
        listener.communicate(timeout=WAIT_S)
        assert listener.returncode == errors.Unauthorized.exit_code, "it was cut off"
    refused = driver.quick("pub", "a", "b", "--server", server, "--creds", file, home=up)
    assert refused.code == errors.Unauthorized.exit_code
    assert "revoked" in refused.err or "Authorization" in refused.err
    assert driver.quick("creds", "show", "bob", "-o", "json", home=up).json()["status"] == "revoked"


def test_credentials_narrowed_to_topics(up, tmp_path):
    file = tmp_path / "meter.creds"
    assert driver.quick("creds", "issue", "meter", "--topic", "meters/>", "--to", file, home=up).code == 0
    assert driver.quick("pub", "meters/1", "7", "--creds", file, home=up).code == 0
    refused = driver.quick("pub", "secrets/1", "7", "--creds", file, home=up)
    assert refused.code == errors.Forbidden.exit_code
    assert "muster creds show meter" in refused.err


def test_a_profile_carries_a_connection(up, tmp_path):
    status = driver.quick("status", "-o", "json", home=up).json()
    creds = tmp_path / "carol.creds"
    assert driver.quick("creds", "issue", "carol", "--to", creds, home=up).code == 0
    made = driver.quick("profile", "add", "here", "--server", status["servers"][0], "--creds", creds, home=up)
    assert made.code == 0
    answer = driver.quick("--profile", "here", "pub", "a", "b", home=up)
    assert answer.code == 0, answer.err


# -- brokers


def test_a_broker_comes_and_goes_while_the_domain_runs(up):
    assert driver.quick("broker", "start", "edge", "--below", "local-1", home=up).code == 0
    names = [row["name"] for row in driver.quick("broker", "list", "-o", "json", home=up).json()]
    assert names == ["local-1", "edge"]
    links = driver.quick("broker", "list", "--links", "-o", "json", home=up).json()
    assert [(link["id"], link["up"]) for link in links] == [("edge>local-1", True)]
    assert driver.quick("broker", "unlink", "edge>local-1", home=up).code == 0
    assert driver.quick("broker", "link", "edge", "local-1", home=up).code == 0
    assert driver.quick("broker", "stop", "edge", home=up).code == 0
    far = f"tls://{'x' * 64}:1"  # a process of its own, which knows nothing of a broker's errors
    dead = driver.run("broker", "link", "local-1", far, "-o", "json", home=up)
    assert dead.code == errors.Unavailable.exit_code, dead.err
    assert json.loads(dead.err)["error"]["code"] == "broker-failed"
    refused = driver.quick("broker", "stop", "local-1", home=up)
    assert refused.code == errors.Refused.exit_code
    assert "settings" in refused.err


# -- the demo


def test_the_demo_shows_everything_stops_by_itself_and_runs_again(tmp_path):
    for form in ("table", "json"):
        answer = driver.run("demo", "-o", form, "--home", tmp_path / "demo")
        assert answer.code == 0, answer.err
        if form == "table":
            assert "Next, create a domain of your own:\n  python -m muster init" in answer.out
            assert answer.out.count("\n") < 20
        else:
            scenes = [json.loads(line)["scene"] for line in answer.out.splitlines()]
            assert scenes == [
                *("domain", "messages", "selection", "storage"),
                *("events", "services", "takeover"),
            ]
        assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_the_demo_removes_nothing_that_is_not_its_own(fresh):
    answer = driver.quick("demo", "--home", fresh)
    assert answer.code == errors.AlreadyExists.exit_code
    assert (fresh / "muster.toml").exists()


# -- JMS messages


def test_datagrams_by_hand(up):
    refused = driver.quick("message", "udp", "send", "queue:light", "feather", home=up)
    assert "'queue:light' is no topic:NAME" in refused.err
    alone = driver.quick("message", "udp", "send", "topic:light/none", "x", "--wait", "0.2s", home=up)
    assert alone.code == errors.TimedOut.exit_code
    listening = (
        "message",
        "udp",
        "receive",
        "topic:light/*",
        "--where",
        "grams < 5",
        "-n",
        "2",
        "-o",
        "json",
    )
    with started(*listening, home=up) as receiver:
        sent = driver.run(
            *("message", "udp", "send", "topic:light/news", "feather", "-p", "grams=1", "--count", "2"),
            *("--wait", "60s", "-o", "json"),
            home=up,
        )
        assert sent.json() == {"topic": "topic:light/news", "messages": 2, "datagrams": 2}, sent.err
        out, err = receiver.communicate(timeout=WAIT_S)
    assert [json.loads(line)["body"] for line in out.splitlines()] == ["feather", "feather"]
    assert "received 2, lost 0, out of order 0" in err


def test_queues_and_subscriptions_by_hand(up):
    def message(*arguments: str, code: int = 0) -> driver.Answer:
        answer = driver.quick("message", *arguments, "-o", "json", home=up)
        assert answer.code == code, answer.err
        return answer

    def queue(name: str) -> dict[str, Any]:
        return next(row for row in message("queues").json() if row["queue"] == name)

    for amount in range(5):
        message("send", "queue:orders", f"chairs {amount}", "-p", f"amount={amount}")
    slip = driver.quick("message", "send", "queu:orders", "chairs", home=up)
    assert slip.code == errors.InvalidInput.exit_code
    assert "neither queue:NAME nor topic:NAME" in slip.err
    shown = message("browse", "orders", "--where", "amount > 2").json()
    assert [(row["body"], row["properties"]) for row in shown] == [
        ("chairs 3", {"amount": 3}),
        ("chairs 4", {"amount": 4}),
    ]
    assert queue("orders")["depth"] == 5
    assert {"in_per_s", "out_per_s", "in_flight"} <= queue("orders").keys()

    got = json.loads(message("receive", "queue:orders", "--where", "amount = 1", "--timeout", "0").out)
    assert got["body"] == "chairs 1"
    status = queue("orders")
    assert (status["depth"], status["consumers"], status["delivered"], status["matched"]) == (
        4,
        0,
        1,
        1,
    )
    assert status["rejected"] >= 1, "the one before it"
    nothing = message(
        *("receive", "queue:orders", "--where", "amount = 9", "--count", str(10**30), "--timeout", "0.1"),
        code=errors.TimedOut.exit_code,
    )
    assert "no message was received from queue:orders" in nothing.err

    assert message("move", "orders", "--to", "queue:later", "--where", "amount > 2").json()["moved"] == 2
    assert message("purge", "orders", "--where", "amount = 0").json()["purged"] == 1
    assert [row["body"] for row in message("browse", "orders").json()] == ["chairs 2"]
    assert [row["body"] for row in message("browse", "later").json()] == ["chairs 3", "chairs 4"]

    reason = ("-p", "JMS_MUSTER_DEAD_REASON=nobody could", "-p", "JMS_MUSTER_DEAD_FROM=queue:orders")
    message("send", "queue:dead-letters", "chairs 5", *reason)
    (dead,) = message("dead-letters").json()
    assert (dead["from"], dead["reason"], dead["body"]) == ("queue:orders", "nobody could", "chairs 5")
    assert message("move", "dead-letters").json()["moved"] == 1
    assert [row["body"] for row in message("browse", "orders").json()] == ["chairs 2", "chairs 5"]

    message("send", "queue:orders", "chairs 6", "--delay", "1h")
    (row,) = message("scheduled", "queue:orders").json()
    assert row["delivery_time_ms"] > row["timestamp_ms"] + 3_000_000
    message("cancel", "9" * 30, code=errors.NotFound.exit_code)  # no number of a message
    message("move", "orders", "--limit", "9" * 30, code=errors.InvalidInput.exit_code)
    assert message("cancel", row["id"]).json()["cancelled"] == 1
    message("cancel", str(row["number"]), code=errors.NotFound.exit_code)
    assert message("scheduled").json() == []

    durable = ("receive", "topic:news/sport", "--durable", "all", "--client-id", "desk", "--timeout")
    selecting = ("--where", "place = 'home'")
    message(*durable, "0.1", *selecting, code=errors.TimedOut.exit_code)
    for place in ("home", "away"):
        message("send", "topic:news/sport", f"won {place}", "-p", f"place={place}")
    assert json.loads(message(*durable, "30", *selecting).out)["body"] == "won home"
    status = next(row for row in message("subscriptions").json() if row["client_id"] == "desk")
    assert (status["subscription"], status["topic"], status["consumers"]) == ("all", "news/sport", 0)
    assert (status["delivered"], status["matched"], status["rejected"]) == (1, 1, 1)

    for table in ("queues", "subscriptions"):
        people = driver.quick("message", table, home=up)
        assert "REJECTED" in people.out
        assert "MATCHED" in people.out

    ending = ("unsubscribe", "all", "--client-id")
    message(*ending, "clerk", code=errors.NotFound.exit_code)
    message(*ending, "desk")
    assert not [row for row in message("subscriptions").json() if row["client_id"] == "desk"]


# -- more parts in one command


def test_up_with_monitoring_runs_a_sensor_and_a_channel(fresh):
    free = [word for key in ("http_port", "statsd_port") for word in ("--set", f"sensor.{key}=0")]
    answer = driver.run("up", "--detach", "--with", "monitoring", *free, "-o", "json", home=fresh)
    assert answer.code == 0, answer.err
    assert answer.json()["parts"] == ["monitoring"]
    parts = {
        part["name"]: part["state"]
        for part in driver.quick("status", "-o", "json", home=fresh).json()["components"]
    }
    assert (parts["sensor"], parts["channel"]) == ("up", "up")  # without waiting any longer
    assert "pipeline" not in parts
    for words in (("channel",), ("sensor", "--name", "sensor")):  # a second one of the same name
        second = driver.run("run", *words, home=fresh, timeout_s=20)
        assert second.code == errors.Conflict.exit_code
        assert f"the domain runs the component '{words[0]}' itself" in second.err
    assert driver.run("down", home=fresh).code == 0


def test_up_fails_with_the_reason_if_a_part_keeps_failing(fresh):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("--detach", "--timeout", "1h", "--with", "soap", "--set", f"soap.port={port}")
        answer = driver.run("up", *words, home=fresh, timeout_s=100)
        assert answer.code == errors.Unavailable.exit_code
        assert "the domain runs, but soap is not up" in answer.err
        assert str(port) in answer.err
        failed = next(
            row for row in driver.quick("doctor", "-o", "json", home=fresh).json() if row["check"] == "domain"
        )
        assert (failed["state"], str(port) in failed["finding"]) == ("fault", True)
    assert driver.run("down", home=fresh).code == 0


def test_a_part_that_crashes_again_and_again_and_a_resource_that_fails_are_named_by_all(fresh):
    rules = fresh / "none.yaml"
    words = ("--detach", "--timeout", "1h", "--with", "pipeline", "--set", f"pipeline.rules={rules}")
    answer = driver.run("up", *words, home=fresh, timeout_s=100)
    assert answer.code == errors.Unavailable.exit_code
    assert "pipeline is not up" in answer.err
    assert f"cannot read the rules '{rules}'" in answer.err
    page = driver.quick("status", "-o", "json", home=fresh).json()
    failed = {row["name"]: row["reason"] for row in page["components"] if row["state"] == "failed"}
    assert list(failed) == ["pipeline"]
    assert str(rules) in failed["pipeline"]
    bad = {"name": "bad-1", "type": "process", "agent": "local", "config": {"command": ["/none"]}}
    manifest = fresh / "bad.json"
    manifest.write_text(json.dumps({"resources": [{**bad, "restart": {"attempts": 1}}]}))
    assert driver.quick("apply", "-f", manifest, home=fresh).code == 0

    def findings() -> dict[str, str]:
        rows = driver.quick("doctor", "-o", "json", home=fresh).json()
        return {row["check"]: row["finding"] for row in rows if row["state"] == "fault"}

    found = driver.wait_until(lambda: "resources" in (seen := findings()) and seen)
    assert "bad-1 on local: failed" in found["resources"]
    assert str(rules) in found["domain"]
    assert driver.run("down", home=fresh).code == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_up_with_everything_runs_a_small_fleet(fresh):
    free = [
        word
        for key in ("sensor.http_port", "sensor.statsd_port", "web.port")
        for word in ("--set", f"{key}=0")
    ]
    parts = ("--with", "monitoring,pipeline", "--with", "web")
    answer = driver.run("up", "--detach", "--timeout", "200s", *parts, *free, home=fresh, timeout_s=250)
    assert answer.code == 0, answer.err
    assert "with monitoring, pipeline, web" in answer.out
    assert "dashboard: http://127.0.0.1:" in answer.out
    assert driver.quick("pipeline", "status", home=fresh).code == 0
    wait = driver.wait_until(
        lambda: driver.quick("report", "system", "-o", "json", home=fresh).json(), not_yet=(ValueError,)
    )
    assert wait["machines"] == 1
    assert driver.run("down", home=fresh).code == 0


def test_up_with_an_unknown_or_uninstalled_part_starts_nothing(fresh, monkeypatch):
    answer = driver.quick("up", "--detach", "--with", "monitoring,telepathy", home=fresh)
    assert answer.code == errors.InvalidInput.exit_code
    assert "'telepathy' is not one of monitoring, pipeline, web, amqp, soap" in answer.err
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyspark" else find(name))
    answer = driver.quick("up", "--detach", "--with", "pipeline", home=fresh)
    assert answer.code == errors.MissingDependency.exit_code
    assert "pip install 'muster-fabric[spark]'" in answer.err
    assert driver.quick("status", "-o", "json", home=fresh).json()["state"] == "stopped"
