"""Every command of management against a real domain with real processes, in the order of a user's day."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pty
import select
import signal
import subprocess
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import parser

from muster.core import errors
from tests.cli import driver

pytestmark = [
    pytest.mark.may_block(reason="commands are run as a shell does"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

WAIT_S = 90.0
SETTINGS = """
[domain]
name = "work"
data_dir = "."
[bus]
port = 0
websocket = true
[manage]
beat_s = "500ms"
"""
MANIFEST = """
resources:
  - name: db
    type: process
    agent: local
    group: data
    labels: {tier: back}
    restart: {attempts: 1000, delay_s: 0.05, delay_s_max: 0.1}
    config: {command: [sh, -c, "echo ready; exec sleep 1000"]}
  - name: web-1
    type: process
    agent: local
    group: web
    depends_on: [db]
    config: {command: [sleep, "1000"]}
  - name: web-2
    type: process
    agent: local
    group: web
    depends_on: [db]
    config: {command: [sleep, "1000"]}
"""


SECRET = """
resources:
  - name: keeper
    type: process
    agent: local
    config:
      command: [sh, -c, 'echo "it has ${#WORD} letters"; exec sleep 1000']
      environment: {WORD: {secret: "store:word"}}
"""


class Shell:
    def __init__(self, home: Path) -> None:
        self.home = home

    def __call__(self, *words: str | Path, code: int = 0) -> Any:
        answer = driver.quick("-o", "json", *words, home=self.home)
        assert answer.code == code, f"{words}: {answer.code} {answer.out} {answer.err}"
        return json.loads(answer.out) if answer.out.strip() else None

    def text(self, *words: str | Path) -> str:
        answer = driver.quick(*words, home=self.home)
        assert answer.code == 0, answer.err
        return answer.out

    def until(self, look: Callable[[], Any]) -> Any:
        return driver.wait_until(look, timeout_s=WAIT_S)

    def state(self, name: str) -> str:
        return str(rows(self("get", name))[0]["state"])

    def pid(self, name: str) -> int:
        """Of what runs now; it may just be falling or rising."""
        return int(self.until(lambda: self("describe", name)["status"]["properties"].get("pid")))


def rollout(shell: Shell, id: str) -> dict[str, Any]:
    return next(row for row in rows(shell("rollout", "list")) if row["id"] == id)


def on_a_terminal(shell: Shell, *words: str) -> str:
    """What a person sees until web-2 is there, and Ctrl-C ends it."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 120))
    running = subprocess.Popen(
        driver.command_line(*words),
        env=driver.environment(shell.home, TERM="xterm"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen, prompted, deadline = b"", False, time.monotonic() + WAIT_S
    try:
        while running.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # its end of the terminal is closed
                if select.select([ours], [], [], 0.2)[0]:
                    seen += os.read(ours, 65536)
            if b"web-2" in seen and not prompted:
                running.send_signal(signal.SIGINT)
                prompted = True
        assert running.returncode in (0, 130), seen
    finally:
        running.kill()
        running.wait()
        os.close(ours)
    return seen.decode("utf-8", "replace")


def measured(shell: Shell, name: str, *values: str) -> float | None:
    """A metric with these values of its labels, as Prometheus gets it from the one page of the machine."""
    with urllib.request.urlopen(f"{shell('status')['health']}/metrics/machine") as page:
        families = parser.text_string_to_metric_families(page.read().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
    found = [sample.value for sample in samples if {*values} <= {*sample.labels.values()}]
    assert len(found) <= 1
    return found[0] if found else None


def rows(actual: Any) -> list[dict[str, Any]]:
    return actual if isinstance(actual, list) else [actual]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "muster.toml").write_text(SETTINGS)
    made = Shell(home)
    try:
        made("up", "--detach")
        yield made
    finally:
        driver.run("down", home=home, timeout_s=WAIT_S)


def test_a_users_day(shell: Shell, tmp_path: Path) -> None:
    manifest = tmp_path / "fleet.yaml"
    manifest.write_text(MANIFEST)

    planned = rows(shell("plan", "-f", manifest))
    assert [(line["wave"], line["name"], line["act"]) for line in planned] == [
        (1, "db", "create"),
        (2, "web-1", "create"),
        (2, "web-2", "create"),
    ]
    assert shell("apply", "-f", manifest, "--wait", "60s")["changed"] == ["db", "web-1", "web-2"]
    assert {row["name"]: row["state"] for row in rows(shell("get"))} == dict.fromkeys(
        ("db", "web-1", "web-2"), "up"
    )
    assert [row["name"] for row in rows(shell("targets", "tier = 'back' AND os = 'linux'"))] == ["db"]
    assert [row["name"] for row in rows(shell("get", "--where", "group = 'web'"))] == ["web-1", "web-2"]
    assert rows(
        shell(
            "sql",
            'SELECT r."group", count(*) AS n, max(a.zone) AS zone FROM resources r '
            "JOIN agents a ON a.name = r.agent GROUP BY ALL ORDER BY ALL",
        )
    ) == [{"group": "data", "n": 1, "zone": "default"}, {"group": "web", "n": 2, "zone": "default"}]
    assert shell("logs", "db") == {"resource": "db", "line": "ready"}
    assert "db     ready\n" in shell.text("logs", "db", "web-1", "-n", "5", "--since", "5m")
    sampled = shell.until(lambda: measured(shell, "muster_resource_memory_bytes", "web-1", "agent-local"))
    assert sampled > 1 << 16
    assert measured(shell, "muster_resource_up", "web-1") == 1
    assert measured(shell, "muster_resource_state", "web-1", "up") == 1
    assert measured(shell, "muster_resource_starts_total", "web-1") == 1
    assert measured(shell, "muster_resource_generation", "web-1") == 1
    shown = shell.text("get")
    assert "web-1" in shown
    assert "up" in shown
    assert "STATE" in shown

    # The plan of a change, before it is applied.
    manifest.write_text(MANIFEST.replace('[sleep, "1000"]', '[sleep, "2000"]', 1))
    (difference,) = rows(shell("diff", "-f", manifest))
    assert (difference["name"], difference["field"]) == ("web-1", "config.command")
    assert psutil.pid_exists(shell.pid("web-1"))
    shell("apply", "-f", manifest, "--wait", "60s")
    assert "2000" in psutil.Process(shell.pid("web-1")).cmdline()

    # A resource whose desired state is down is waited for until it is.
    idle = tmp_path / "idle.yaml"
    item = '{name: idle, type: process, agent: local, desired: down, config: {command: [sleep, "1"]}}'
    idle.write_text(f"resources: [{item}]")
    shell("apply", "-f", idle, "--wait", "60s")
    assert [row["state"] for row in rows(shell("get", "idle"))] == ["down"]
    shell("delete", "idle", "--wait", "60s")

    # A killed process is restarted, and a watching client sees it.
    watching = subprocess.Popen(
        driver.command_line("-o", "json", "watch"),
        env=driver.environment(shell.home),
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        assert watching.stdout is not None
        before = shell.pid("db")
        os.kill(before, signal.SIGKILL)
        shell.until(lambda: shell.state("db") == "up" and shell.pid("db") != before)
        received: set[str] = set()
        while "up" not in received:  # it may not have listened yet
            with contextlib.suppress(ProcessLookupError):  # the pid may be that of the previous run
                os.kill(shell.pid("db"), signal.SIGKILL)
            shell.until(lambda: shell.state("db") == "up")
            while select.select([watching.stdout], [], [], 0.2)[0]:
                received.add(json.loads(watching.stdout.readline())["state"])
        assert received & {"down", "starting"}  # a quick restart ends before "down" is reported
    finally:
        watching.kill()
        watching.wait()
        assert watching.stdout is not None
        watching.stdout.close()

    # Operations.
    before = shell.pid("web-2")
    (done,) = rows(shell("exec", "web-2", "restart"))
    assert done["outcome"] == "done"
    shell.until(lambda: shell.pid("web-2") != before)
    before, failed = shell.pid("web-2"), len(shell("describe", "web-2")["status"].get("failures_ms", ()))
    shell("exec", "web-2", "signal", "--argument", "number=9")
    shell.until(lambda: shell.pid("web-2") != before and shell.state("web-2") == "up")
    status = shell("describe", "web-2")["status"]
    assert len(status["failures_ms"]) == failed + 1, "one kill is one failure"
    (listed,) = rows(shell("exec", "web-2", "enumerate"))
    assert "signal" in listed["result"]["operations"]
    assert rows(shell("exec", "web-2", "dance", code=1))[0]["outcome"] == "refused"
    (rolled,) = rows(shell("rollout", "start", "restart", "--where", "group = 'web'", "--batch", "50%"))
    assert (rolled["state"], rolled["counts"]) == ("done", {"done": 2})
    assert rows(shell("rollout", "list"))[-1]["id"] == rolled["id"]

    # One that is paused between its batches, and resumed.
    (begun,) = rows(shell("rollout", "start", "web-1", "web-2", "restart", "--pause", "3s", "--no-wait"))
    assert shell("rollout", "pause", begun["id"])["state"] == "paused"
    shell.until(lambda: rollout(shell, begun["id"])["counts"].get("done") == 1)
    assert rollout(shell, begun["id"])["state"] == "paused"
    assert shell("rollout", "resume", begun["id"])["state"] == "running"
    shell.until(lambda: rollout(shell, begun["id"])["state"] == "done")
    shell.until(lambda: shell.state("web-1") == shell.state("web-2") == "up")

    # A secret: kept, used, never shown.
    result = driver.quick("secret", "set", "word", home=shell.home, stdin="swordfish\n")
    assert (result.code, result.out) == (0, "word was stored\n")
    with_secret = tmp_path / "secret.yaml"
    with_secret.write_text(SECRET)
    shell("apply", "-f", with_secret, "--wait", "60s")
    shell.until(lambda: "it has 9 letters" in json.dumps(shell("logs", "keeper")))
    assert [row["used_by"] for row in rows(shell("secret", "list"))] == [["keeper"]]
    refused = driver.quick("secret", "delete", "word", home=shell.home)
    assert refused.code != 0
    assert "keeper refer(s) to" in refused.err
    shown = "".join(
        shell.text(*words) for words in (("describe", "keeper"), ("secret", "list"), ("activity",))
    )
    assert "swordfish" not in shown
    kept = [path for path in shell.home.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"swordfish" in path.read_bytes()]
    shell("delete", "keeper", "--wait", "60s")
    shell("secret", "delete", "word")

    # The fleet on a terminal, and for a program.
    shells = shell("top", "--resources", "--once")
    assert (shells["resources"], shells["states"]) == (3, {"up": 3})
    assert {row["name"] for row in shells["rows"]} == {"db", "web-1", "web-2"}
    drawn = on_a_terminal(shell, "top", "--resources", "--where", "group = 'web'", "--every", "200ms")
    assert "3 resources" in drawn
    assert "web-2" in drawn
    assert "sh -c" not in drawn

    # Draining.
    shell("drain", "web-2")
    shell.until(lambda: shell.state("web-2") == "down")
    shell("drain", "web-2", "--kind", "resource", "--undo")
    shell.until(lambda: shell.state("web-2") == "up")

    # A drill.
    killed = rows(shell("get", "db"))[0]["manager"]
    shell("chaos", "kill", killed)
    shell.until(
        lambda: (
            {row["name"]: row["starts"] for row in rows(shell("chaos", "list"))}[killed] == 2
            and shell.state("db") == "up"
        )
    )
    assert {row["name"] for row in rows(shell("get", "--managers"))} >= {"manager-1", "manager-2"}

    # The audit says who did what.
    whats = [(row["who"], row["what"], row["outcome"]) for row in rows(shell("activity"))]
    assert ("admin", "apply", "done") in whats
    assert ("admin", "exec", "refused") in whats
    assert ("admin", "rollout", "done") in whats
    assert ("admin", "drain", "done") in whats

    # This domain has no sensor: top says so.
    unseen = driver.quick("top", "--once", home=shell.home)
    assert unseen.code == errors.NotFound.exit_code
    assert "muster run sensor" in unseen.err

    # Others may look, or not even that.
    for role, may_look in (("viewer", True), ("user", True)):
        creds = tmp_path / f"{role}.creds"
        shell("creds", "issue", f"bob-{role}", "--role", role, "--to", creds)
        arguments = ("--server", shell("status")["brokers"][0]["url"], "--creds", creds)
        assert bool(rows(shell("get", *arguments))) is may_look
        if role == "user":
            refused = driver.quick("delete", "db", *arguments, home=shell.home)
            assert refused.code == 3
            assert "only an operator may delete" in refused.err
            refused = driver.quick("exec", "db", "stop", *arguments, home=shell.home)
            assert "only an operator may exec" in refused.err
    creds = tmp_path / "eve.creds"
    shell("creds", "issue", "eve", "--role", "operator", "--to", creds)
    arguments = ("--server", shell("status")["brokers"][0]["url"], "--creds", creds)
    refused = driver.quick("exec", "db", *arguments, "--", "true", home=shell.home)
    assert refused.code == 3
    assert "eve may not run commands inside resources" in refused.err
    assert "--shell" in refused.err
    whats = [(row["who"], row["what"], row["outcome"]) for row in rows(shell("activity"))]
    assert ("bob-user", "delete", "refused") in whats
    assert ("bob-user", "exec", "refused") in whats
    assert ("eve", "shell", "refused") in whats
    assert shell.state("db") == "up"

    deleted = driver.quick("delete", "-f", "-", "--wait", "60s", home=shell.home, stdin=MANIFEST)
    assert deleted.code == 0, deleted.err
    assert not shell("get")


def test_commands_run_inside_a_resource(shell: Shell, tmp_path: Path) -> None:
    """From a pipe and a file, as JSON, and on a terminal."""
    applied = driver.quick("apply", "-f", "-", "--wait", "60s", home=shell.home, stdin=MANIFEST)
    assert applied.code == 0, applied.err
    script = "read word; echo got $word; echo bad >&2; exit 3"
    command = driver.command_line("exec", "web-1", "--", "sh", "-c", script)
    options: Any = {"env": driver.environment(shell.home), "capture_output": True, "text": True}
    (tmp_path / "input").write_text("one\n")
    with (tmp_path / "input").open() as file:
        done = subprocess.run(command, stdin=file, timeout=WAIT_S, check=False, **options)
    assert (done.stdout, done.stderr, done.returncode) == ("got one\n", "bad\n", 3)
    command = driver.command_line("-o", "json", "exec", "web-1", "--", "sh", "-c", "cat; kill $$")
    done = subprocess.run(command, input="a\n", timeout=WAIT_S, check=False, **options)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"output": "a\n"}, {"exit_code": -15}]
    assert done.returncode == 128 + 15
    for words in (("web-1", "web-2", "--", "ls"), ("web-1", "--"), ("web-1", "--where", "1 = 1", "--", "ls")):
        assert "a command runs in one resource" in driver.quick("exec", *words, home=shell.home).err

    # The keys, Ctrl-C and the size of a terminal, which is as before at the end.
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 120))
    before = termios.tcgetattr(theirs)
    running = subprocess.Popen(
        driver.command_line("exec", "web-1", "--", "sh"),
        env=driver.environment(shell.home, TERM="xterm", PS1="> "),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    seen = b""

    def shows(text: bytes) -> bool:
        nonlocal seen
        if select.select([ours], [], [], 0.2)[0]:
            seen += os.read(ours, 65536)
        return text in seen

    try:
        for typed, shown in (
            (b"stty size\n", b"30 120"),
            (b"sleep 1000; echo code $?\n", b"sleep 1000"),
            (b"\x03", b"^C"),
            (b"echo $TERM $((6 * 7))\n", b"xterm 42"),
        ):
            os.write(ours, typed)
            shell.until(functools.partial(shows, shown))
        termios.tcsetwinsize(theirs, (31, 121))
        running.send_signal(signal.SIGWINCH)
        shell.until(lambda: os.write(ours, b"stty size\n") and shows(b"31 121"))
        os.write(ours, b"exit 7\n")
        assert running.wait(WAIT_S) == 7
        assert termios.tcgetattr(theirs) == before
    finally:
        running.kill()
        running.wait()
        os.close(ours)
        os.close(theirs)
    recorded = [row for row in rows(shell("activity")) if row["what"] == "shell"]
    assert {row["why"] for row in recorded} >= {"admin runs sh", "exit code 7"}
    deleted = driver.quick("delete", "-f", "-", "--wait", "60s", home=shell.home, stdin=MANIFEST)
    assert deleted.code == 0, deleted.err


def test_a_machine_joins_with_a_token_and_hosts(shell: Shell, tmp_path: Path) -> None:
    """By WebSocket: all that a firewall lets out."""
    door = shell("status")["brokers"][0]["websocket_url"]
    token = shell("agent", "token", "host-b", "--address", door)["token"]
    command = driver.command_line(
        *("-o", "json", "agent", "--join", token, "--folder", tmp_path / "agent"),
        *("--label", "disk=ssd", "--zone", "east", "--beat", "500ms"),
    )
    agent = subprocess.Popen(
        command, env=driver.environment(tmp_path), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert agent.stdout is not None
        assert json.loads(agent.stdout.readline())["agent"] == "host-b"
        shell.until(lambda: "host-b" in {row["name"] for row in rows(shell("get", "--agents"))})
        manifest = tmp_path / "fleet.yaml"
        manifest.write_text(
            "resources: [{name: far, type: process, where: \"disk = 'ssd' AND zone = 'east'\", "
            'config: {command: [sleep, "1000"]}}]'
        )
        shell("apply", "-f", manifest, "--wait", "60s")
        assert rows(shell("get", "far"))[0]["agent"] == "host-b"
        again = driver.quick("agent", "--join", token, "--folder", tmp_path / "other", home=tmp_path)
        assert again.code != 0, "a token is for one use"
        shell("apply", "-f", manifest, "--wait", "60s")
        refused = driver.quick("agent", "forget", "host-b", home=shell.home)
        assert "host-b" in refused.err
        assert "is live" in refused.err
        assert rows(shell("agent", "orphans")) == []
        shell("agent", "forget", "host-b", "--force")
        shell.until(lambda: "far" not in {row["name"] for row in rows(shell("get"))})
        # Its credentials end when nothing is left on it.
        shell.until(lambda: shell("creds", "show", "host-b")["status"] == "revoked")
        shell.until(lambda: "host-b" not in {row["name"] for row in rows(shell("get", "--agents"))})
    finally:
        agent.terminate()
        agent.wait(timeout=WAIT_S)
        assert agent.stdout is not None
        agent.stdout.close()


@pytest.mark.slow
def test_a_machine_that_was_given_up_stops_what_runs_elsewhere(shell: Shell, tmp_path: Path) -> None:
    """Its agent is frozen, as by a partition; its processes run on."""
    token = shell("agent", "token", "host-b")["token"]
    words = ("-o", "json", "agent", "--join", token, "--folder", tmp_path / "agent", "--beat", "500ms")
    agent = subprocess.Popen(
        driver.command_line(*words),
        env=driver.environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def apply(agent: str) -> None:
        manifest = tmp_path / "fleet.yaml"
        manifest.write_text(
            f"resources: [{{name: service, type: process, agent: {agent}, "
            'config: {command: [sleep, "1000"]}}, '
            '{name: near, type: process, agent: local, config: {command: [sleep, "1000"]}}]'
        )
        shell("apply", "-f", manifest, "--wait", "60s")

    def agent_state() -> str:
        return next((row["state"] for row in rows(shell("get", "--agents")) if row["name"] == "host-b"), "")

    try:
        shell.until(lambda: agent_state())
        apply("host-b")
        there = shell.pid("service")
        agent.send_signal(signal.SIGSTOP)
        shell.until(lambda: agent_state() in ("down", "unknown"))
        shell("agent", "forget", "host-b")
        apply("local")
        here = shell.pid("service")
        assert psutil.pid_exists(there)
        agent.send_signal(signal.SIGCONT)
        shell.until(lambda: not psutil.pid_exists(there))
        assert shell.pid("service") == here
        assert psutil.pid_exists(here)
        deleted = next(row for row in rows(shell("activity")) if row["what"] == "delete-orphan")
        assert deleted["target"] == "service"
        shell.until(lambda: shell("creds", "show", "host-b")["status"] == "revoked")
        shell.until(lambda: not agent_state())
        shell("delete", "service", "near", "--wait", "60s")
    finally:
        agent.send_signal(signal.SIGCONT)
        agent.terminate()
        agent.wait(timeout=WAIT_S)
        assert agent.stdout is not None
        agent.stdout.close()
