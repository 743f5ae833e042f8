"""Every background task of Muster is supervised, and a failure of every long-running loop has consequences.

The calls are collected from the source, so a new loop without a supervisor fails `test_tasks_are_supervised`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import fnmatch
import functools
import os
import signal
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import msgspec
import pytest

from muster.app import domain, home, identities, service_manager
from muster.app import settings as app_settings
from muster.app.components import component, factories, management
from muster.app.machines import follower, growth
from muster.app.supervisor import (
    component_config,
    component_process,
    endpoints,
    machine_alerts,
    worker,
    worker_config,
)
from muster.bus import api, leases
from muster.bus.client import credential_source
from muster.bus.direct import bus as direct_bus
from muster.bus.direct import dialer, nearest
from muster.bus.http import client as http_client
from muster.bus.http import server
from muster.bus.log import owned_log
from muster.cli import command
from muster.cli.monitoring import simulate
from muster.cli.resources import agent
from muster.client import location
from muster.core import errors
from muster.core.settings import loader
from muster.core.telemetry import metrics
from muster.gateways import udp
from muster.gateways.soap import asgi
from muster.gateways.soap import server as soap_server
from muster.loop import reaction_rules, reactions
from muster.manage import settings as manage_settings
from muster.manage.adapters import systemd
from muster.message import destinations
from muster.message.client import api as client_api
from muster.notify import client as notify_client
from muster.notify import models
from muster.pipeline import protocol
from muster.pipeline.job import service
from muster.pipeline.job.driver import driver_lease
from muster.simulate import fleet as virtual_fleet
from muster.supervision import tasks
from muster.testing.eventually import eventually
from muster.trust import certificates, keyring
from muster.trust.login import password_checker, passwords
from muster.trust.permissions import roles
from muster.web import server as web_server
from muster.web import settings as web_settings
from tests import debian
from tests.bus import keyed_state
from tests.manage import podman, test_adapters
from tests.manage.conftest import broker_access as broker_access
from tests.manage.conftest import fleet as fleet
from tests.manage.conftest import process_manifest as process_manifest
from tests.manage.conftest import trust as trust
from tests.pipeline import traffic

ROOT = Path(__file__).parents[2] / "src" / "muster"
SUPERVISOR = "supervision/tasks.py"
CREATORS = {"create_task", "ensure_future"}

#: Tasks outside the supervisor, by file and function, with the reason.
UNSUPERVISED = {
    "app/domain.py: Domain.guard": "awaited in place",
    "app/process.py: run": "awaited in place",
    "app/supervisor/component_process.py: run": "awaited in place",
    "app/supervisor/fork_server.py: ForkServer.spawn": "awaited in place",
    "app/supervisor/worker.py: run_worker": "awaited in place",
    "bus/brokers/broker.py: Broker.reserve": "awaited in place",
    "bus/client/subscriptions.py: BoundedSubscription._make_room": "unsubscribes once",
    "bus/client/subscriptions.py: BoundedSubscription.accept": "counts and logs each failure of the handler",
    "bus/direct/bus.py: DirectBus._repeat": "ends with the request, which raises its error",
    "bus/locator/server.py: Locator._fresh": "awaited by all callers",
    "bus/memory/streams.py: _Reading._change": "awaited in place",
    "bus/rpc/single_flight.py: SingleFlight.once": "awaited by all callers",
    "cli/monitoring/simulate.py: _play": "awaited in place",
    "client/front.py: AsyncMuster._spawn": "a failure ends run() and is raised there",
    "client/front.py: AsyncMuster._decorator": "awaited by run()",
    "client/messages.py: AsyncSubscription.__init__": "an error is raised to the reader",
    "demo/outbreak.py: Outbreak._qualify": "a failure ends the scenario and is raised there",
    "demo/frozen_broker.py: _Subscriber.start": "its end is awaited, and its error raised, when it is closed",
    "demo/frozen_broker.py: scenes": "awaited in place",
    "demo/tour.py: takeover": "awaited in place",
    "demo/web_farm.py: WebFarm.run": "awaited in place",
    "demo/web_farm.py: _main": "ends the process when its input ends",
    "gateways/amqp/connection.py: AmqpConnection.end": "awaited by all callers",
    "inform/node/shared_rounds.py: SharedRounds.next": "passes each failure to its callers",
    "inform/node/replicas/links.py: NodeLinks._exchange": "ends with the request, which raises its error",
    "manage/adapters/broker.py: BrokerAdapter._end_broker": "awaited by the operation",
    "manage/adapters/process.py: ProcessAdapter._wait_for_end": "awaited in place",
    "manage/adapters/shell.py: LocalShell.__init__": "awaited by `wait` and `close`",
    "manage/adapters/transitions.py: Transitions.reach": "awaited by the operation",
    "manage/agent/shells.py: ShellSession.run": "awaited in place",
    "manage/log_stream.py: LogStream._start_requests": "awaited by `lines`, which raises its error",
    "manage/registry/operations.py: _send_page": "awaited in place",
    "message/dispatcher/leadership.py: DispatcherLeadership._run": "awaited in place",
    "message/dispatcher/leadership.py: DispatcherLeadership._run_dispatcher": "awaited in place",
    "message/dispatcher/peers/transactions.py: Transactions._resolve": "awaited by all callers",
    "notify/notifier/shards/shard_manager.py: ShardManager._hold_shard": "awaited in place",
    "notify/notifier/shards/shard_manager.py: _first": "awaited in place",
    "pipeline/job/service.py: PipelineService._begin_spark": "awaited where Spark is needed, or at the end",
    "supervision/children.py: end_process": "awaited in place",
    "testing/child_process.py: ChildProcess.__init__": "reads the output of a process under test",
    "trust/login/password_checker.py: PasswordChecker.verified": "awaited by all callers",
    "web/pages/routes.py: _inside": "awaited in place, or shown by the next request",
    "web/rest/event_stream.py: _with_beats": "awaited in place",
    "web/rest/event_stream.py: watch_logs": "awaited in place",
}


class _Calls(ast.NodeVisitor):
    """Functions with calls of `CREATORS`, except on a TaskGroup, which raises the error to its owner."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._path: list[str] = []

    def _enter(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _enter

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in CREATORS:
            on_group = isinstance(node.func.value, ast.Name) and node.func.value.id != "asyncio"
            if not on_group or node.func.value.id in ("loop",):  # type: ignore[attr-defined]
                self.found.add(".".join(self._path))
        self.generic_visit(node)


def test_tasks_are_supervised():
    actual: set[str] = set()
    for file in sorted(ROOT.rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        text = file.read_text()
        if name != SUPERVISOR and any(creator in text for creator in CREATORS):
            calls = _Calls()
            calls.visit(ast.parse(text))
            actual |= {f"{name}: {_outer(function)}" for function in calls.found}
    assert actual - set(UNSUPERVISED) == set(), "use a TaskSupervisor, or give the reason here"
    assert set(UNSUPERVISED) - actual == set(), "these are gone"


def _outer(function: str) -> str:
    """The method, or the function of a module: inner functions belong to it."""
    first, *rest = function.split(".")
    is_class = first.lstrip("_")[:1].isupper()
    return f"{first}.{rest[0]}" if is_class and rest else first


# A failure of each loop


WATCH = "bus/leases.py: watch"  # ends when the lease is gained
WEBHOOK = "http://127.0.0.1:9/"
RULES = f"rules: []\nreceivers:\n  ops: {{webhook: '{WEBHOOK}'}}\n"
COMMANDS = ("app/gateways/amqp.py: certificate", "cli/monitoring/simulate.py: commands")


@functools.cache  # not at the import, which each worker does
def _loops_in_source() -> set[str]:
    """File and name of each loop; a varying part of a name is ``*``."""
    loops = set()
    for file in sorted(ROOT.rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if "loop(" in text else ():
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "loop":
                loops.add(f"{file.relative_to(ROOT).as_posix()}: {_pattern(node.args[0])}")
    return loops


def _pattern(name: ast.expr) -> str:
    if isinstance(name, ast.Constant):
        return str(name.value)
    if not isinstance(name, ast.JoinedStr):
        return "*"
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in name.values)


@dataclass(frozen=True)
class Started:
    supervisor: tasks.TaskSupervisor
    name: str
    on_failure: tasks.OnFailure


@pytest.fixture
def started(monkeypatch) -> dict[str, list[Started]]:
    """The loops that this test started, by file and name."""
    loops: dict[str, list[Started]] = {}
    original = tasks.TaskSupervisor.loop

    def recorded(self, name, run, *, on_failure=tasks.OnFailure.RESTART):
        file = Path(sys._getframe(1).f_code.co_filename)
        if file.is_relative_to(ROOT):
            place = file.relative_to(ROOT).as_posix()
            (key,) = (key for key in _loops_in_source() if fnmatch.fnmatchcase(f"{place}: {name}", key))
            loops.setdefault(key, []).append(Started(self, name, on_failure))
        return original(self, name, run, on_failure=on_failure)

    monkeypatch.setattr(tasks.TaskSupervisor, "loop", recorded)
    return loops


async def fail_each(started: dict[str, list[Started]], without: Collection[str] = (WATCH,)) -> None:
    """Fail a run of each loop; a loop that is declared fatal is started again by its owner."""
    for key in sorted(set(started) - set(without)):

        def running(key: str = key) -> Started | None:
            live = [loop for loop in started[key] if loop.name in loop.supervisor._runs]
            return live[-1] if live else None

        loop = await eventually(running, what=f"{key} runs")
        assert loop is not None
        before = tasks.failures()[loop.supervisor.owner, loop.name]
        loop.supervisor.inject(loop.name, RuntimeError(f"injected into {loop.name}"))

        def failed(loop: Started = loop, before: int = before) -> bool:
            return tasks.failures()[loop.supervisor.owner, loop.name] > before

        await eventually(failed, what=f"the failure of {key} is counted")
        if loop.on_failure is tasks.OnFailure.RESTART:
            problem = f"{loop.supervisor.owner}: {loop.name} failed: RuntimeError: injected into {loop.name}"
            shown = loop.supervisor._problems[loop.name][0]
            assert f"{loop.supervisor.owner}: {loop.name} failed: {shown}" == problem
            assert tasks.problems(), key
        await eventually(running, what=f"{key} runs again")


async def test_a_failure_of_each_loop_of_a_domain_is_counted_shown_and_followed_by_a_restart(
    tmp_path, started, caplog, monkeypatch
):
    rules, reactions_file = tmp_path / "responses.yaml", tmp_path / "reactions.yaml"
    rules.write_text("responses: []\n")
    reactions_file.write_text("reactions: []\n")
    flags = {
        "bus.tls": "on",
        "bus.locator": True,
        "syslog.url": "udp://127.0.0.1:9",
        "reactions.rules": str(reactions_file),
        "domain.data_dir": str(tmp_path),
        "manage.enabled": False,
        "inform.processes": False,
        "web.enabled": False,
        "channel.enabled": True,
        "sensor.enabled": True,
        "sensor.http_port": 0,
        "sensor.statsd_port": 0,
        "responder.rules": str(rules),
        "health.otlp_url": "http://127.0.0.1:9",
    }
    made = loader.load(app_settings.Settings, flags=flags)
    async with contextlib.AsyncExitStack() as stack:
        parts = [*factories.components(made), CannotStart()]
        running = await stack.enter_async_context(domain.Domain(made, components=parts))
        bus = await stack.enter_async_context(await running.connect("ann", roles.Role.USER))
        jms = await stack.enter_async_context(client_api.Connection(bus))
        await jms.session().consumer(destinations.queue("orders"))
        datagrams = await stack.enter_async_context(udp.UdpSession(jms))
        await datagrams.publisher(destinations.topic("prices"))
        await datagrams.subscriber(destinations.topic("prices"))
        stack.push_async_callback(await _start_further_dispatcher(running, made))
        await stack.enter_async_context(_reacting(running))
        await fail_each(started)
        _shown_in_pages(await http_client.get(f"{running.running.health_url}/readyz"))
        measured = await http_client.get(f"{running.running.health_url}/metrics")
        assert 'muster_task_failures_total{owner="dispatcher",task="journal"}' in measured.body.decode()
        failed = set(started)
        commands = _commands(made, *await asyncio.to_thread(_home, tmp_path))
        for loop, command_ in zip(COMMANDS, commands, strict=True):
            with _input(monkeypatch):
                serving = asyncio.create_task(command_)
                await eventually(lambda: serving.done() or loop in started, what=f"{loop} is started")  # noqa: B023
                assert not serving.done(), serving.result()
                await fail_each({loop: started[loop]})
                os.kill(os.getpid(), signal.SIGTERM)
                await serving
    assert "task-failed" in caplog.text
    covered.update({*failed, *COMMANDS} - {WATCH})


class CannotStart:
    """A component whose start is repeated."""

    name = "cannot-start"
    depends_on: Sequence[str] = ()
    vital = False

    async def start(self, context: Any) -> None:
        raise errors.Unavailable("never")

    async def stop(self) -> None: ...

    def health(self) -> component.ComponentHealth:
        raise NotImplementedError


def _home(folder: Path) -> tuple[command.Invocation, Path]:
    """A home for commands of the domain in ``folder``, and a certificate."""
    place = home.Home(folder / "home")
    place.root.mkdir()
    place.settings_file.write_text(f'[domain]\ndata_dir = "{folder}"\n')
    place.stamp()
    authority = certificates.CertificateStore.create(folder / "ca", "north", lifetime_s=3600)
    authority.ensure("amqp", ["127.0.0.1"])
    return command.Invocation(home=place.root), authority.pair("amqp").path


def _commands(
    made: app_settings.Settings, invocation: command.Invocation, pem: Path
) -> Iterator[Coroutine[Any, Any, None]]:
    """What commands with loops of their own run in their processes, here."""
    amqp = msgspec.structs.replace(made.amqp, port=0, certificate=str(pem), key=str(pem), processes=1)
    config = component_config.ComponentConfig(
        component="amqp", settings=msgspec.structs.replace(made, amqp=amqp)
    )
    yield component_process.run_in_front(config, lambda *_: None)
    machine = virtual_fleet.VirtualFleet(virtual_fleet.FleetPlan(machines=1, period_s=1.0))
    to = location.ConnectionOptions()
    yield simulate._play(invocation, to, machine, "sim", "batches", "", None, True)


@contextlib.contextmanager
def _input(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """Standard input that ends with the block."""
    inner, outer = os.pipe()
    with os.fdopen(inner) as given, os.fdopen(outer, "w") as written:
        monkeypatch.setattr(sys, "stdin", given)
        yield written


@contextlib.asynccontextmanager
async def _reacting(running: domain.Domain) -> AsyncIterator[None]:
    """A resource that is a receiver of events, and its commands."""
    rule = reaction_rules.ReactionSpec(
        where="TRUE", model="Server", policy="command", operations=("restart",)
    )
    bus = await running.connect("reacting", roles.Role.OPERATOR)
    async with bus, notify_client.NotifyClient(bus) as receivers:
        await receivers.define(models.Model("Server", {}))
        await receivers.define(models.Model("command", {}, models.ModelKind.EVENT))
        reacting = reactions.ResourceReceivers(bus, [rule])
        await reacting._join(receivers, "web-1", reaction_rules.ResourceReceiver(rule=rule, state={}))
        try:
            yield
        finally:
            await reacting._supervisor.close()


async def _start_further_dispatcher(
    running: domain.Domain, made: app_settings.Settings
) -> Callable[[], Awaitable[None]]:
    """What the process of a further dispatcher runs, here. Returns what ends it."""
    config = component_config.ComponentConfig(component="message", settings=made, process="dispatcher-1")
    stop = asyncio.Event()
    serving = asyncio.create_task(component_process.run(config, stop, lambda *_: None))

    async def end() -> None:
        stop.set()
        await serving

    return end


def _shown_in_pages(answer: server.HttpResponse) -> None:
    assert answer.status == 503
    assert "injected into" in answer.json()["parts"]["tasks"]["reason"]


@pytest.fixture
def socket_of_podman() -> Iterator[str]:
    debian.PODMAN.require()
    if os.geteuid() != 0:
        pytest.skip("a Podman of its own needs root here")
    with podman.podman() as path:
        yield path


async def test_a_failure_of_each_loop_of_management_is_counted_shown_and_followed_by_a_restart(
    monkeypatch, socket_of_podman, fleet, started, process_manifest, broker_access, tmp_path
):
    program = tmp_path / "systemctl"
    program.write_text(test_adapters.SYSTEMCTL)
    program.chmod(0o755)
    monkeypatch.setattr(systemd, "PROGRAM", str(program))
    monkeypatch.setenv("STATE_DIR", str(tmp_path))
    script = tmp_path / "query.py"
    script.write_text("import time\ntime.sleep(600)\n")
    await fleet.registry()
    await fleet.registry("registry-2")  # follows the log
    await fleet.manager()
    guard = mock.Mock(renewed_at=mock.Mock(return_value=None))
    await fleet.agent(broker_access=broker_access, measure=metrics.Metrics(), guard=guard)
    page = await server.serve({"/": lambda _: server.text("ok")}, "127.0.0.1", 0)
    async with page:
        checked = f"      health: {{kind: http, url: 'http://127.0.0.1:{page.port}/'}}\n"
        await fleet.client.apply(process_manifest("sleeper", more=checked))
        service = f"""
resources:
  - {{name: site, type: http, agent: host-a, config: {{health_url: "http://127.0.0.1:{page.port}/"}}}}
  - {{name: unit, type: systemd, agent: host-a, config: {{unit: thing.service}}}}
  - name: query
    type: spark-query
    agent: host-a
    config: {{script: {script}, checkpoint: {tmp_path}/checkpoint, progress_s: 600}}
  - {{name: hub, type: broker, agent: host-a, config: {{storage: false, reserve: spoke, ring: [hub, spoke]}}}}
  - {{name: motd, type: file, agent: host-a, config: {{path: {tmp_path}/motd, content: hello}}}}
  - name: box
    type: container
    agent: host-a
    config:
      image: {podman.IMAGE}
      command: [sleep, "600"]
      network: none
      pull: never
      socket: {socket_of_podman}
      health: {{kind: command, command: [cat, /bin/cat]}}
"""
        await fleet.client.apply(service)
        names = ("sleeper", "site", "unit", "hub", "motd", "box")
        for name in names:
            await fleet.client.wait(name, "up", timeout_s=30)
        await fail_each(started)
        for name in names:
            await fleet.client.wait(name, "up", timeout_s=30)
    covered.update(set(started) - {WATCH})


async def test_a_failure_of_each_loop_of_a_gateway_and_a_dashboard_is_followed_by_a_restart(
    connect, started, tmp_path
):
    amqp_gateway = pytest.importorskip("muster.gateways.amqp.gateway", reason="python-qpid-proton is missing")
    checker = password_checker.PasswordChecker(passwords.PasswordStore(tmp_path))

    async def join(login: passwords.PasswordLogin) -> Any:
        return await connect(login.name)

    class Here:
        async def connect(self, identity: str, role: roles.Role) -> Any:
            return await connect(f"{identity}-{role.value}")

        async def place(self) -> str:
            return "here"

    authority = certificates.CertificateStore.create(tmp_path / "ca", "north", lifetime_s=3600)
    authority.ensure("web", ["127.0.0.1"])
    pem = str(authority.pair("web").path)
    stop = asyncio.Event()
    async with amqp_gateway.AmqpGateway(join, checker):
        serving = asyncio.create_task(
            web_server.serve(
                web_settings.WebSettings(cert=pem, key=pem),
                location=Here(),
                trust=keyring.Keyring.create(tmp_path / "keys", "north"),
                domain="north",
                folder=tmp_path,
                history="",
                listener=endpoints.Endpoint("https", "127.0.0.1", 0).listen(),
                stop=stop,
                measure=metrics.Metrics(),
            )
        )
        try:
            await eventually(lambda: "web/server.py: source" in started)
            await fail_each(started)
        finally:
            stop.set()
            await serving
    covered.update(set(started) - {WATCH})


@pytest.mark.may_block(reason="certificates are files")
async def test_a_failure_of_each_loop_that_needs_little_is_followed_by_a_restart(
    broker, connect, started, tmp_path, monkeypatch
):
    """Loops of parts that the tests above do not start: a few seconds without their peers are enough."""
    authority = certificates.CertificateStore.create(tmp_path / "ca", "north", lifetime_s=3600)
    authority.ensure("soap", ["127.0.0.1"])
    pem = str(authority.pair("soap").path)
    systemd = {"NOTIFY_SOCKET": str(tmp_path / "systemd"), "WATCHDOG_USEC": "3000000"}
    bus = await connect("pipeline")
    async with contextlib.AsyncExitStack() as stack:
        for part in (
            service_manager.ServiceManager(systemd).reporting(),
            soap_server.SoapServer(asgi.SoapApplication({}), certificate=pem, key=pem),
        ):
            await stack.enter_async_context(part)
        first = await stack.enter_async_context(await leases.Leases.open(await connect("first")))
        other_bus = await connect("second")
        second = await stack.enter_async_context(await leases.Leases.open(other_bus))
        held = await first.acquire("leader")
        held_driver = await first.acquire(protocol.driver_lease("second"))
        await stack.enter_async_context(_lifeline(monkeypatch))
        rules = tmp_path / "rules.yaml"
        rules.write_text(RULES)
        end_pipelines = asyncio.Event()
        await bus.stream(traffic.STREAM)
        monkeypatch.setattr(service.PipelineService, "_start_spark", lambda _: mock.MagicMock())
        monkeypatch.setattr(service.PipelineService, "_start_query", lambda *_: mock.MagicMock())
        monkeypatch.setattr(service.PipelineService, "_watch", _until_stopped)
        pipelines = [
            asyncio.create_task(
                component_process.run(_pipeline(tmp_path / name, broker.url, rules), end_pipelines, _ignore)
            )
            for name in ("driver", "standby")
        ]
        await stack.enter_async_context(_direct_connections(monkeypatch, connect, pem, tmp_path / "keys"))
        await stack.enter_async_context(_revocation(monkeypatch))
        await stack.enter_async_context(_renewal(monkeypatch, tmp_path))
        logs = api.StreamSettings("logs", subjects=("log.>",), max_bytes=1 << 20, max_age_s=0)
        log = owned_log.OwnedLog(await bus.stream(logs), "log.a", keyed_state.KeyedState())
        stack.push_async_callback(log.stop)
        await log.start()
        waiting = asyncio.create_task(second.acquire("leader"))
        standby = driver_lease.DriverLease(other_bus, second)
        standing_by = asyncio.create_task(standby.acquire())
        await eventually(lambda: len(started.get(WATCH, ())) >= 4, what="the second and the standby wait")
        both = {"pipeline/job/service.py: prepare", "pipeline/job/service.py: maintenance"}
        await eventually(lambda: both <= started.keys(), what="a pipeline is driver, another its standby")
        await fail_each(started, without=())
        await held.release()
        await held_driver.release()
        await (await waiting).release()
        await standing_by
        await standby.close()
        end_pipelines.set()
        await asyncio.gather(*pipelines)
    covered.update(started)


async def _until_stopped(pipeline: service.PipelineService, _: Any) -> None:
    await pipeline._stop.wait()


def _ignore(*_: Any) -> None: ...


def _pipeline(folder: Path, url: str, rules: Path) -> component_config.ComponentConfig:
    flags = {"domain.data_dir": str(folder), "pipeline.rules": str(rules)}
    flags["pipeline.webhooks_allowed"] = WEBHOOK
    settings = loader.load(app_settings.Settings, flags=flags)
    return component_config.ComponentConfig(component="pipeline", settings=settings, servers=(url,))


@contextlib.asynccontextmanager
async def _direct_connections(
    monkeypatch: pytest.MonkeyPatch, connect: Any, pem: str, keys: Path
) -> AsyncIterator[None]:
    """A manager that accepts direct connections, an agent that makes some, and a client of contexts."""
    trust = keyring.Keyring.create(keys, "north")
    trust.issue("manager-1", roles.Role.MANAGER)
    access = credential_source.PeerAccess(functools.partial(trust.credentials, "manager-1"), None)
    client_bus = await connect("c")
    client_bus.peer_access = access
    near = nearest.of(client_bus, "inform", lambda _: "")
    for _ in range(nearest.REQUESTS_MIN):
        with contextlib.suppress(errors.Unavailable):
            await near.request("muster.inform.from.c.read.any.get", b"")

    async def joined(*_: Any) -> Any:
        made = await connect("manager-1")
        made.peer_access = access
        return made

    monkeypatch.setattr(worker, "connect", joined)
    task = worker_config.WorkerConfig(
        component="manager",
        identity="manager-1",
        settings=loader.load(
            app_settings.Settings, flags={"trust.keys_dir": str(keys), "health.enabled": False}
        ),
        direct=worker_config.DirectPort(port=0, cert=pem, cert_key=pem),
    )
    stop, ready = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(worker.run(task, stop, ready.set))
    await ready.wait()
    agent_bus = direct_bus.DirectBus(None, "host-a", lambda _: "")
    try:
        async with dialer.DirectDialer(agent_bus, access) as dialing:
            dialing.keep(dialer.configured("127.0.0.1:9", tls=False))
            yield
    finally:
        stop.set()
        await serving


@contextlib.asynccontextmanager
async def _revocation(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A machine that enrolled again with another key: the brokers do not have the revocation yet."""
    published = asyncio.Event()
    monkeypatch.setattr(identities, "publish_accounts", lambda *_, **__: published.wait())
    enrolled = types.SimpleNamespace(name="host-a", jwt="jwt", replaced=True, joining="")
    running = types.SimpleNamespace(servers=(), ca="")
    part = management.ManagementComponent(manage_settings.ManageSettings())
    part._enrolment = types.SimpleNamespace(enrol=mock.AsyncMock(return_value=enrolled))  # type: ignore[assignment]
    supervisor = tasks.TaskSupervisor("manage")
    part._context = types.SimpleNamespace(  # type: ignore[assignment]
        tasks=supervisor, trust=None, folder=types.SimpleNamespace(running=lambda: running)
    )
    try:
        await part._enrol(types.SimpleNamespace(identity="enrol-1"), "key")  # type: ignore[arg-type]
        part._watch_forgotten()
        part._watch_managers()
        yield
        published.set()
        await eventually(lambda: not supervisor.loops, what="the revocation is published")
    finally:
        await supervisor.close()
        await part._tasks.close()


@contextlib.asynccontextmanager
async def _renewal(monkeypatch: pytest.MonkeyPatch, folder: Path) -> AsyncIterator[None]:
    """The command of an agent that waits for its connection."""

    async def waits(*_: Any, at_once: bool = False) -> None:
        if not at_once:
            await asyncio.Event().wait()

    monkeypatch.setattr(agent, "_enrolled", mock.AsyncMock())
    monkeypatch.setattr(agent, "keep_credentials", waits)
    monkeypatch.setattr(agent, "_connect", waits)
    invocation = command.Invocation(home=folder)
    task = asyncio.create_task(agent._run(invocation, None, folder, None, (), "default", {}, 1.0))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@contextlib.asynccontextmanager
async def _lifeline(monkeypatch) -> AsyncIterator[None]:
    """The input of a process that the domain supervises, which ends with the domain."""
    inner, outer = os.pipe()
    with os.fdopen(inner) as given, os.fdopen(outer, "w") as domain_end:
        domain_end.write("{}\n")
        domain_end.flush()
        monkeypatch.setattr(sys, "stdin", given)
        async with component_process.supervised() as (configuration, stop):
            yield
            domain_end.close()
            await stop.wait()
    assert configuration == b"{}\n"


async def test_a_failure_of_each_loop_of_machines_is_counted_shown_and_followed_by_a_restart(
    monkeypatch, started
):
    """With loops that wait: `tests/app/test_machine_list.py` and hosts have the real ones."""

    async def wait(_: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(growth.StorageGrowth, "_grow", wait)
    monkeypatch.setattr(follower.MachineFollower, "_follow", wait)
    supervisor = tasks.TaskSupervisor("machines")
    context = mock.Mock(tasks=supervisor)
    try:
        await growth.StorageGrowth(*[mock.Mock()] * 3).start(context)
        await follower.MachineFollower(*[mock.Mock()] * 3).start(context)
        await fail_each(started)
    finally:
        await supervisor.close()
    covered.update(started)


async def test_a_failure_of_the_loop_of_alerts_is_counted_shown_and_followed_by_a_restart(
    monkeypatch, started
):
    """With a loop that waits: `tests/manage/test_targets.py` has the real one."""

    async def wait(_: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(machine_alerts.MachineAlerts, "follow", wait)
    async with contextlib.AsyncExitStack() as stack:
        await worker.follow_alerts(stack, mock.Mock())
        await fail_each(started)
    covered.update(started)


covered: set[str] = set()


def test_each_loop_was_failed():
    if not covered:
        pytest.skip("the tests above did not run")
    assert covered == _loops_in_source()
