"""Fuzz the network endpoints of a real domain: ``make fuzz TARGET=AMQP N=1000``.

While an endpoint gets inputs (10,000 by default), a client sends correct requests to it. Afterwards the
process has to be the same one, with bounded memory, without a traceback in its log, and the client has to be
served as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from muster.app import home
from muster.bus.client import client as bus_client
from muster.bus.http import client as http_client
from muster.core import errors
from muster.gateways import udp
from muster.gateways.wsman.wire import namespaces
from muster.inform import client as inform_client
from muster.manage import client as manage_client
from muster.message import destinations
from muster.message.client import api as message_api
from muster.notify import client as notify_client
from muster.notify import models
from muster.predicates import types
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests.app import test_soap_roles
from tests.cli import driver
from tests.faults import outages
from tests.fuzz import amqp_session, endpoints, network_seeds, result, run, wire

INPUTS = 10_000
GROWTH_BYTES_MAX = 96e6
GOOD_S = 0.05  # between correct requests
GOOD_S_MAX = 2.0  # p99 of a correct request
BEFORE = 60  # correct requests before the first input
#: Operations that end processes when they are called correctly.
EXCLUDED = re.compile(r"\.(kill|restart|stop|start|reload|link|unlink|forget)\b")
TRACEBACK = re.compile(r'Traceback \(most recent|this is a bug in Muster|"event":"operation-failed"')
SETTINGS = {
    "sensor.http_port": "0",
    "sensor.statsd_port": "0",
    "sensor.period_s": "1",
    "soap.port": "0",
    "web.port": "0",
    "manage.registries": "1",
    "manage.managers": "1",
}
PASSWORD = test_soap_roles.PASSWORD
OTHER_ADDRESS = "127.0.0.2"
WIRE = "wire"  # without a domain


@dataclass
class EndpointResult:
    name: str
    inputs: int
    took_s: float
    before_ms: float  # p99 of correct requests
    during_ms: float
    growth_bytes: float
    problems: list[str]

    def line(self) -> str:
        verdict = "ok" if not self.problems else f"FAILED: {'; '.join(self.problems)}"
        return (
            f"{self.name:18} {self.inputs:>7,} inputs {self.took_s:6.1f} s  correct requests p99 "
            f"{self.before_ms:6.0f} -> {self.during_ms:6.0f} ms, "
            f"memory {self.growth_bytes / 1e6:+6.1f} MB  {verdict}"
        )

    def row(self) -> result.FuzzRow:
        words = f"{'; '.join(self.problems) or 'ok'}: correct requests p99 {self.during_ms:.0f} ms"
        words += f", memory {self.growth_bytes / 1e6:+.0f} MB"
        return result.FuzzRow(name=self.name, kind="endpoint", inputs=self.inputs, result=words)


class FuzzedDomain(outages.Drill):
    """A domain with every network endpoint, and the endpoints."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.endpoints: dict[str, endpoints.Endpoint] = {}
        self._recorded: dict[str, list[bytes]] = {}
        self._chance = random.Random(0)

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        flags = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
        await self.command("init", "--port", "0", *flags)
        for role in ("operator", "user"):
            words = ("gateway", "password", role, "--role", role)
            answer = await asyncio.to_thread(driver.run, *words, home=self.home, stdin=f"{PASSWORD}\n")
            assert not answer.code, answer.err
        await self.command("up", "--detach", "--with", "monitoring,soap,web", "--timeout", "140s")
        try:
            status = await self.status()
            self.servers = [broker["url"] for broker in status["brokers"]]
            async with self._stack:
                await self._make_endpoints(status)
                yield
        finally:
            await self.command("down", "--force")

    @property
    def logs(self) -> Path:
        return self.settings().domain.folder / "logs"

    async def pids(self) -> dict[str, int]:
        status = await self.status()
        pids = {re.sub(r"-\d{4,}$", "", page["process"]): page["pid"] for page in status["pages"]}
        return pids | {"broker": status["brokers"][0]["pid"], "here": psutil.Process().pid}

    def tracebacks(self) -> int:
        return sum(len(TRACEBACK.findall(path.read_text())) for path in self.logs.glob("*"))

    async def connect(self, identity: str, role: roles.Role) -> bus_client.NatsBus:
        return await self._connect(identity, role, self.servers[0])

    def _add(self, endpoint: endpoints.Endpoint) -> None:
        self.endpoints[endpoint.name] = endpoint

    async def _make_endpoints(self, status: dict[str, Any]) -> None:
        # The correct client has another address, because limits are those of an address.
        other = httpx.AsyncHTTPTransport(local_address=OTHER_ADDRESS)
        http = await self._stack.enter_async_context(httpx.AsyncClient(timeout=30, transport=other))
        running = await asyncio.to_thread(home.DomainFolder(self.settings().domain.folder).running)
        assert running is not None
        await self._http("locator", "domain", http, f"{running.locator_url}/livez", network_seeds.LOCATOR)
        await self._http("health pages", "domain", http, f"{running.health_url}/livez", network_seeds.HEALTH)
        await self._intake(http)
        await self._soap(http, next(row["url"] for row in status["soap"]).removesuffix("/wsman"))
        await self._rest(http, str(running.web_url))
        await self._amqp()
        await self._udp()
        await self._services(status["brokers"][0]["monitor_url"])

    async def _http(
        self,
        name: str,
        process: str,
        http: httpx.AsyncClient,
        good: str,
        seeds: list[endpoints.HttpSeed],
        correct: Any = None,
    ) -> None:
        parts = urllib.parse.urlsplit(good)
        assert parts.port is not None

        async def get() -> None:
            (await http.get(good)).raise_for_status()

        self._add(
            endpoints.Endpoint(
                name,
                process,
                functools.partial(endpoints.http_input, seeds=seeds),
                endpoints.to_stream("127.0.0.1", parts.port),
                correct or get,
            )
        )

    async def _intake(self, http: httpx.AsyncClient) -> None:
        pid = (await self.pids())["domain"]
        ports = {
            (connection.type.name, connection.laddr.port)
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status in ("LISTEN", "NONE") and connection.laddr.ip == "127.0.0.1"
        }
        statsd = next(port for kind, port in ports if kind == "SOCK_DGRAM")
        report = network_seeds.INTAKE[0]
        for kind, port in ports:
            if kind == "SOCK_STREAM":
                with contextlib.suppress(httpx.HTTPError):
                    url = f"http://127.0.0.1:{port}/report"
                    answer = await http.post(url, content=report.body)
                    if answer.status_code == 200:
                        break
        else:
            raise AssertionError("the sensor has no intake")

        async def push() -> None:
            (await http.post(url, content=report.body)).raise_for_status()

        await self._http("sensor intake", "domain", http, url, network_seeds.INTAKE, push)
        make = functools.partial(endpoints.bytes_input, seeds=network_seeds.STATSD)
        self._add(
            endpoints.Endpoint("statsd", "domain", make, endpoints.to_datagrams("127.0.0.1", statsd), push)
        )

    async def _soap(self, http: httpx.AsyncClient, url: str) -> None:
        seeds: list[endpoints.HttpSeed] = []

        async def record(request: httpx.Request) -> None:
            headers = tuple(
                (name, request.headers[name])
                for name in ("content-type", "authorization")
                if name in request.headers
            )
            path = request.url.raw_path.decode()
            seeds.append(endpoints.HttpSeed("POST", path, headers, request.content))

        recording = httpx.AsyncClient(timeout=60, event_hooks={"request": [record]})
        async with recording:
            soap = test_soap_roles.Soap(url, recording)
            for name in ("r", "gone"):
                await soap.wsman(namespaces.CREATE, "operator", name)
            for action in test_soap_roles.WSMAN:
                await soap.wsman(action, "operator")
            for operation in test_soap_roles.CONTEXT:
                await soap.context(operation, "operator")
            soap.tokens = {role: await soap.token(role) for role in ("operator", "user")}
            await test_soap_roles.publish(soap)
            for operation in test_soap_roles.UDDI:
                if operation not in ("get_authToken", "discard_authToken"):
                    await soap.uddi(operation, "operator")
        good = test_soap_roles.Soap(url, http)

        async def identify() -> None:
            (await good.wsman("Identify", "anonymous")).raise_for_status()

        for name, paths in (
            ("WS-Management", ("/wsman",)),
            ("WS-Context", ("/context", "/contextmanager")),
            ("UDDI", ("/uddi",)),
        ):
            chosen = [seed for seed in seeds if seed.path in paths]
            await self._http(name, "soap", http, f"{url}{paths[0]}", chosen, identify)

    async def _rest(self, http: httpx.AsyncClient, url: str) -> None:
        await eventually(functools.partial(_answers, http, f"{url}/login"), timeout_s=60)
        answer = await asyncio.to_thread(driver.run, "web", "password", "-o", "json", home=self.home)
        password = answer.json()["password"]
        login = await http.post(f"{url}/api/v1/tokens", json={"name": "admin", "password": password})
        token = {"authorization": f"Bearer {login.json()['token']}"}
        document = (await http.get(f"{url}/api/v1/openapi.json")).json()
        seeds = []
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if "tokens" in path or "watch" in path or "logins" in path:
                    continue
                example = b"{}" if "requestBody" in operation else b""
                filled = re.sub(r"\{\w+\}", "name", path)
                headers = (*token.items(), ("content-type", "application/json"))
                bodies = {example, network_seeds.REST_BODY if example else example}
                seeds += [endpoints.HttpSeed(method.upper(), filled, headers, body) for body in bodies]

        async def get() -> None:
            (await http.get(f"{url}/api/v1/resources", headers=token)).raise_for_status()

        await self._http("REST", "web", http, url, seeds, get)

    async def _amqp(self) -> None:
        trust_user = await self.connect("fuzz-amqp", roles.Role.USER)
        await trust_user.close()
        with (self.logs / "amqp.log").open("ab") as log:
            gateway = await asyncio.create_subprocess_exec(
                *driver.command_line("run", "amqp", "--set", "amqp.processes=1", "--set", "amqp.port=0"),
                *("--set", "amqp.anonymous=fuzz-amqp", "--home", str(self.home)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=driver.environment(self.home),
            )
        self._stack.push_async_callback(gateway.wait)
        self._stack.callback(gateway.terminate)
        port = 0

        def serves() -> bool:
            nonlocal port
            match = re.search(r"amqp://127\.0\.0\.1:(\d+)", (self.logs / "amqp.log").read_text())
            port = int(match[1]) if match else 0
            return port > 0

        await eventually(serves, timeout_s=60)
        recorded = await amqp_session.recorded(port)
        make = functools.partial(endpoints.bytes_input, seeds=recorded)

        async def exchange() -> None:
            await asyncio.to_thread(amqp_session.exchange, port)

        self._add(endpoints.Endpoint("AMQP", "amqp", make, endpoints.to_stream("127.0.0.1", port), exchange))

    async def _udp(self) -> None:
        topic = destinations.topic("light/news")
        connections = [
            await self._stack.enter_async_context(
                message_api.Connection(await self.connect(f"udp-{number}", roles.Role.USER))
            )
            for number in (1, 2)
        ]
        receiver = await self._stack.enter_async_context(udp.UdpReceiver(connections[0], topic))
        sender = await self._stack.enter_async_context(udp.UdpSender(connections[1], topic))
        await eventually(lambda: sender.receivers == 1, timeout_s=30)
        seeds: list[bytes] = []
        received = receiver.datagram_received

        def record(data: bytes, addr: Any) -> None:
            if len(seeds) < 20:
                seeds.append(data)
            received(data, addr)

        receiver.datagram_received = record  # type: ignore[method-assign]
        for number in range(5):
            sender.send(f"seed {number}")
            await asyncio.wait_for(anext(receiver), 5)

        async def exchange() -> None:
            sender.send("correct")
            await asyncio.wait_for(anext(receiver), 5)

        host, port = receiver._socket.get_extra_info("sockname")[:2]
        make = functools.partial(endpoints.bytes_input, seeds=seeds)
        self._add(
            endpoints.Endpoint("JMS over UDP", "here", make, endpoints.to_datagrams(host, port), exchange)
        )

    # Requests to services

    async def _services(self, monitor_url: str) -> None:
        await self._record_requests()
        page = (await http_client.get(f"{monitor_url}/connz?subs=1&limit=1000", timeout_s=10.0)).json()
        patterns = sorted(
            {
                pattern
                for connection in page["connections"]
                for pattern in connection.get("subscriptions_list", ())
                if re.match(r"muster\.\w+\.from\.\*\.", pattern) and not EXCLUDED.search(pattern)
            }
        )
        by_part: dict[str, list[str]] = {}
        for pattern in patterns:
            by_part.setdefault(pattern.split(".")[1], []).append(pattern)
        operator = await self.connect("fuzz-operator", roles.Role.OPERATOR)
        manage = manage_client.ManageClient(operator)
        contexts = inform_client.InformClient(operator)
        await contexts.put("fuzz/good", b"1")
        for part, of_part in by_part.items():
            seeds = [
                data for subject, kept in self._recorded.items() if f".{part}." in subject for data in kept
            ]
            self._add(
                endpoints.Endpoint(
                    f"requests: {part}",
                    "domain",
                    functools.partial(endpoints.bytes_input, seeds=[*seeds, *network_seeds.GENERIC]),
                    endpoints.to_subject(operator, functools.partial(self._subject, of_part)),
                    (lambda: manage.names(where="TRUE"))
                    if part == "manage"
                    else (lambda: contexts.get("fuzz/good")),
                )
            )

    def _subject(self, patterns: list[str]) -> str:
        pattern = self._chance.choice(patterns).replace(".from.*.", ".from.fuzz-operator.")
        words = ("0", "1", "name", "any", "local", "fuzz", "x" * 100, "read", "resources", "apply")
        return re.sub(r"\*|>", lambda _: self._chance.choice(words), pattern)

    async def _record_requests(self) -> None:
        """Use the services correctly, and keep the requests."""
        bus = await self.connect("recorder", roles.Role.OPERATOR)
        original = bus.request

        async def request(subject: str, data: bytes, **more: Any) -> Any:
            self._recorded.setdefault(subject, []).append(data)
            return await original(subject, data, **more)

        bus.request = request  # type: ignore[method-assign]
        manage, contexts = manage_client.ManageClient(bus), inform_client.InformClient(bus)
        manifest = "resources: [{name: fuzz-1, type: memory, agent: local, config: {value: 1}}]"
        with contextlib.suppress(errors.MusterError):
            await manage.apply(manifest)
            await manage.plan(manifest)
            await manage.describe("fuzz-1")
            await manage.get("fuzz-1")
            await manage.exec("restart", "fuzz-1", timeout_s=5)
            await manage.put("fuzz-1", desired="down")
            await manage.names(where="group = 'default'")
        await contexts.put("fuzz/a", b"value")
        await contexts.get("fuzz/a")
        await contexts.find("TRUE")
        await contexts.history("fuzz/a")
        await contexts.delete("fuzz/a")
        number = types.AttributeType(types.ValueKind.INT)
        async with notify_client.NotifyClient(bus) as notify:
            await notify.define(models.Model("Fuzzed", {"place": number}))
            await notify.define(models.Model("ping", {"n": number}, kind=models.ModelKind.EVENT))
            receiver = await notify.advertise("fuzz", "Fuzzed", {"place": 1}, policy="TRUE", durable=True)
            await receiver.send("ping", {"n": 1}, to="place = 1", durable=True)
        async with message_api.Connection(bus) as connection, connection.session() as session:
            await session.producer(destinations.queue("fuzz")).send("text")
            consumer = await session.consumer(destinations.queue("fuzz"))
            await consumer.receive(5.0)
        bus.request = original  # type: ignore[method-assign]

    # Judgement

    async def fuzz(self, name: str, inputs: int, seed: int) -> EndpointResult:
        endpoint, chance = self.endpoints[name], random.Random(f"{seed} {name}")
        pid = (await self.pids())[endpoint.process]
        process = psutil.Process(pid)
        before = [await _timed(endpoint) for _ in range(BEFORE)]
        tracebacks, memory = self.tracebacks(), process.memory_info().rss
        during: list[float] = []
        problems: list[str] = []

        async def correct() -> None:
            while True:
                during.append(await _timed(endpoint))
                await asyncio.sleep(GOOD_S)  # pace of the correct client

        client = asyncio.create_task(correct())
        started_s = time.monotonic()
        pending = iter(range(inputs))

        async def worker() -> None:
            for _ in pending:
                await endpoint.send(endpoint.make(chance))

        await asyncio.gather(*(worker() for _ in range(endpoint.at_once)))
        took_s = time.monotonic() - started_s
        await asyncio.sleep(2 * GOOD_S)  # pace: one more correct request
        if client.done():
            problems.append(f"the correct client failed: {client.exception()!r}")
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        growth = 0.0
        if (await self.pids()).get(endpoint.process) != pid:
            problems.append("the process ended")
        else:
            growth = process.memory_info().rss - memory
        if growth > GROWTH_BYTES_MAX:
            problems.append(f"memory grew by {growth / 1e6:.0f} MB")
        if self.tracebacks() > tracebacks:
            problems.append(f"{self.tracebacks() - tracebacks} tracebacks in the log")
        during_ms = _p99_ms(during)
        if during_ms > 1000 * GOOD_S_MAX:
            problems.append("correct requests are slow")
        return EndpointResult(name, inputs, took_s, _p99_ms(before), during_ms, growth, problems)


async def _timed(endpoint: endpoints.Endpoint) -> float:
    began_s = time.perf_counter()
    await endpoint.good()
    return time.perf_counter() - began_s


def _p99_ms(times: list[float]) -> float:
    return 1000 * (statistics.quantiles(times, n=100)[-1] if len(times) > 1 else sum(times))


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await http.get(url)).status_code == 200
    return False


async def fuzz_wire(folder: Path, inputs: int, seed: int) -> EndpointResult:
    """The connection itself: hostile messages to all services of a small broker (`wire`)."""
    started_s, memory = time.monotonic(), psutil.Process().memory_info().rss
    victims = await wire.fuzz(folder, inputs, seed)
    growth = psutil.Process().memory_info().rss - memory
    request_ms = 1000 * (time.monotonic() - started_s) / max(1, victims.served)
    return EndpointResult(
        WIRE, inputs, time.monotonic() - started_s, 0.0, request_ms, growth, victims.problems[:10]
    )


async def main(
    chosen: Collection[str], inputs: int, seed: int = 1, *, save: bool = False
) -> list[EndpointResult]:
    """``chosen``: the names of endpoints; none: all."""
    results = []
    with tempfile.TemporaryDirectory(prefix="muster-fuzz-") as folder:
        if not chosen or WIRE in chosen:
            results.append(await fuzz_wire(Path(folder) / "wire", inputs, seed))
            sys.stdout.write(f"{results[-1].line()}\n")
            if save:
                result.save(results[-1].row())
            if set(chosen) == {WIRE}:
                return results
        domain = FuzzedDomain(Path(folder) / "home")
        async with domain.up():
            names = [name for name in domain.endpoints if not chosen or name in chosen]
            if unknown := set(chosen) - {*names, WIRE}:
                raise SystemExit(f"there is no endpoint {unknown}: choose from {', '.join(domain.endpoints)}")
            for name in names:
                results.append(await domain.fuzz(name, inputs, seed))
                sys.stdout.write(f"{results[-1].line()}\n")
                sys.stdout.flush()
                if save:
                    result.save(results[-1].row())
            if any(result.problems for result in results):
                for path in sorted(domain.logs.glob("*")):
                    for match in TRACEBACK.finditer(text := path.read_text()):
                        sys.stdout.write(
                            f"{path.name}: {text[max(0, match.start() - 500) : match.end() + 3000]}\n"
                        )
    return results


if __name__ == "__main__":
    options = run.arguments(__doc__).parse_args()
    names = list(filter(None, options.targets.split(",")))
    results = asyncio.run(main(names, options.inputs or INPUTS, save=options.save))
    sys.exit(sum(bool(each.problems) for each in results))
