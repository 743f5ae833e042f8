"""Management as a component of a domain: its processes are restarted when killed; machines are enrolled."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
import types
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from muster import connection
from muster.app import domain, enrolment, home, identities
from muster.app import settings as app_settings
from muster.app.components import bootstrap_client, factories, management
from muster.app.supervisor import child_component, component_config, worker_config
from muster.bus.rpc import client as rpc
from muster.core import errors, messages
from muster.core.settings import loader
from muster.manage import client, protocol, settings
from muster.manage.agent import agent
from muster.supervision import children
from muster.testing.eventually import eventually
from muster.trust import credentials, keyring, sealed_box
from muster.trust.permissions import roles

MANIFEST = """
resources:
  - name: sleeper
    type: process
    agent: local
    config: {command: [sleep, "1000"]}
"""


def test_a_registry_has_the_budget_of_the_settings(tmp_path):
    flags = {"domain.data_dir": str(tmp_path), "retention.registry.max_bytes": 5 << 20}
    made = component_config.ComponentConfig(
        component="", settings=loader.load(app_settings.Settings, flags=flags)
    )
    context: Any = types.SimpleNamespace(
        folder=home.DomainFolder(tmp_path),
        trust=keyring.Keyring.create(tmp_path / "keys", "local"),
        config=lambda component, **changes: msgspec.structs.replace(made, component=component, **changes),
    )
    task = management._worker_config(context, settings.ManageSettings(beat_s=7.0), "registry-1", "")
    received = msgspec.json.decode(msgspec.json.encode(task), type=worker_config.WorkerConfig)
    assert received.settings.retention.registry.max_bytes == 5 << 20
    assert received.settings.manage.beat_s == 7.0


WITH_SECRET = MANIFEST.replace('"1000"]}', '"1000"], environment: {WORD: {secret: "store:word"}}}')


@pytest.fixture
async def running(tmp_path, monkeypatch):
    probes = children.ProbePolicy(period_s=0.5, timeout_s=5.0, failures_max=3)
    monkeypatch.setattr(child_component, "PROBE_POLICY", probes)
    flags = {
        "domain.data_dir": str(tmp_path),
        "manage.enabled": True,
        "manage.beat_s": 0.5,
        "manage.registries": 2,
    }
    made = loader.load(app_settings.Settings, flags=flags)
    async with domain.Domain(made, components=factories.components(made)) as started:
        yield started


async def test_processes_are_killed_and_everything_comes_back(running):
    admin = await running.connect("admin", roles.Role.OPERATOR)
    async with admin:
        fleet = client.ManageClient(admin)
        await fleet.apply(MANIFEST)
        first = await fleet.wait("sleeper", "up", timeout_s=30)
        assert first.manager is not None
        for victim in (first.manager, "registry-1", "registry-2", "agent-local"):
            await bootstrap_client.BootstrapClient(admin).kill(victim)

        async def back():
            row = (await fleet.get("sleeper"))[0]
            return row.state == "up" and row.epoch > first.epoch

        await eventually(back, timeout_s=30)
        starts = {row.name: row.starts for row in await bootstrap_client.BootstrapClient(admin).processes()}
        assert starts["agent-local"] == 2
        await nursery_is_replaced(admin)
        whats = [decision.what for decision in await fleet.decisions()]
        assert "apply" in whats
        await fleet.delete("sleeper")
        await fleet.wait_gone("sleeper")


async def nursery_is_replaced(admin: Any) -> None:
    """Without the process that bears them, those it bore live on; the next that falls is born of another."""

    async def processes() -> dict[str, bootstrap_client.ProcessRow]:
        return {row.name: row for row in await bootstrap_client.BootstrapClient(admin).processes()}

    async def all_run() -> bool:
        return all(process.pid for process in (await processes()).values())

    def nursery() -> Any:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):  # or it is one that has ended already
                if "muster.app.supervisor.fork_server" in child.cmdline():
                    return child
        return None

    await eventually(all_run, timeout_s=30)
    before, first = await processes(), nursery()
    first.kill()
    await eventually(lambda: nursery() is None or nursery().pid != first.pid)
    assert await processes() == before
    await bootstrap_client.BootstrapClient(admin).kill("manager-1")

    async def anew() -> bool:
        now = await processes()
        return bool(now["manager-1"].pid not in (None, before["manager-1"].pid))

    await eventually(anew, timeout_s=30)
    others = {name: process.pid for name, process in before.items() if name != "manager-1"}
    after = await processes()
    assert {name: after[name].pid for name in others} == others
    assert nursery().pid != first.pid


async def enrol(text: str, folder: Path) -> str:
    token = enrolment.EnrolmentToken.parse(text)
    key = await asyncio.to_thread(enrolment.machine_key, folder)
    creds = credentials.Credentials.parse(token.creds)
    tls = ssl.create_default_context(cadata=token.ca) if token.ca else None
    async with await connection.connect(token.servers, creds=creds, tls=tls) as bus:
        answer = await bootstrap_client.BootstrapClient(bus, timeout_s=5).enrol(key.public)
    await asyncio.to_thread(enrolment.write_credentials, folder, key, answer.jwt)
    return (folder / "agent.creds").read_text()


async def nothing_but_to_ask(text: str) -> None:
    """The token of an agent has none of its rights: it receives nothing, and its messages are refused."""
    token = enrolment.EnrolmentToken.parse(text)
    tls = ssl.create_default_context(cadata=token.ca) if token.ca else None
    creds = credentials.Credentials.parse(token.creds)
    async with await connection.connect(token.servers, creds=creds, tls=tls) as bus:
        me = bus.identity
        hello = messages.encode(protocol.AgentHello(boot=1))
        for subject in (
            *(protocol.hello(me), protocol.hello("host-b"), protocol.request(me, "get")),
            *(f"muster.manage.from.{me}.domain.token", "topic.news", f"muster.inform.from.{me}.read.get"),
        ):
            with pytest.raises((errors.Forbidden, errors.Unavailable)):
                await bus.request(subject, hello, timeout_s=0.5)
        for subject in ("muster.manage.all.>", f"muster.manage.to.{me}.>", "topic.>", "_INBOX.>"):
            with pytest.raises(errors.Forbidden):
                async with await bus.subscribe(subject, handler=lambda _: None):
                    await bus.flush()


async def test_a_machine_is_admitted_once_and_again_after_a_reinstallation(running, tmp_path, monkeypatch):
    admin = await running.connect("admin", roles.Role.OPERATOR)
    async with admin:
        fleet = client.ManageClient(admin)
        made = await bootstrap_client.BootstrapClient(admin).token("host-b")
        first = credentials.Credentials.parse(await enrol(made.token, tmp_path / "one"))
        assert first.identity == "host-b"
        with pytest.raises(errors.Forbidden, match="is spent"):
            await enrol(made.token, tmp_path / "two")
        async with await connection.connect(running.servers, creds=first) as bus:
            async with agent.Agent(bus, tmp_path / "hosted", beat_s=0.5):

                async def there():
                    return "host-b" in {item.name for item in await fleet.agents()}

                await eventually(there)
                # A machine may have done what its own receivers accepted, and nothing to the others.
                # Both are given the secret that they refer to.
                await fleet.set_secret("word", "swordfish")
                await fleet.apply(WITH_SECRET)
                await fleet.apply(WITH_SECRET.replace("local", "host-b").replace("sleeper", "dozer"))
                for name in ("sleeper", "dozer"):
                    await fleet.wait(name, "up", timeout_s=30)
                (done,) = await client.ManageClient(bus).exec("restart", "dozer")
                assert done.outcome == "done"
                with pytest.raises(errors.Forbidden, match="sleeper"):
                    await client.ManageClient(bus).exec("restart", "sleeper")
                with pytest.raises(errors.Forbidden, match="sleeper"):
                    await client.ManageClient(bus, on_behalf_of="admin").exec("restart", "sleeper")
                for asker in (bus, admin):
                    requests: dict[str, Any] = {
                        "resource": "sleeper",
                        "name": "word",
                        "key": sealed_box.SealedBoxKey.create().public,
                    }
                    with pytest.raises(errors.Forbidden):
                        await rpc.call(asker, protocol.request(asker.identity, protocol.SECRET), requests)
                await fleet.delete("sleeper", "dozer")
                await fleet.wait_gone("sleeper", "dozer")
            # A claim alone makes no process a manager or an agent.
            renewal = messages.encode(protocol.RenewRequest(boot=1))
            with pytest.raises(errors.Forbidden):
                await bus.request(protocol.renew("host-b"), renewal, timeout_s=30)

            async def managers_of_the_domain() -> bool:
                return {manager.name for manager in await fleet.managers()} == {"manager-1", "manager-2"}

            await eventually(managers_of_the_domain, timeout_s=30)
            async with await running.connect("bob", roles.Role.USER) as user:
                hello = messages.encode(protocol.AgentHello(boot=1))
                answer = await user.request(protocol.hello("bob"), hello, timeout_s=10)
                with pytest.raises(errors.Forbidden, match="role user"):
                    rpc.result_of(answer.data)
            own = client.ManageClient(bus)
            with pytest.raises(errors.Forbidden):
                await own.apply(MANIFEST)
            with pytest.raises(errors.Forbidden):
                await own.get()
        again = await bootstrap_client.BootstrapClient(admin).token("host-b", approval=True)
        with pytest.raises(errors.Unavailable, match="approval"):
            await enrol(again.token, tmp_path / "three")
        await nothing_but_to_ask(again.token)
        with pytest.raises(errors.Forbidden, match="another machine"):
            await enrol(again.token, tmp_path / "thief")
        await bootstrap_client.BootstrapClient(admin).approve("host-b")
        publish, failed = identities.publish_accounts, list[str]()

        async def fail_first(*arguments: Any, **options: Any) -> None:
            if not failed:
                failed.append("once")
                raise errors.Unavailable("no broker replied")
            await publish(*arguments, **options)

        monkeypatch.setattr(identities, "publish_accounts", fail_first)
        second = credentials.Credentials.parse(await enrol(again.token, tmp_path / "three"))
        assert second.claims.sub != first.claims.sub

        async def refused():
            try:
                async with await connection.connect(running.servers, creds=first):
                    return False
            except errors.MusterError:
                return True

        await eventually(refused)
        assert failed == ["once"]
        async with await connection.connect(running.servers, creds=second):
            assert [item.name for item in await fleet.agents()].count("host-b") == 1


@pytest.mark.slow
async def test_a_process_that_runs_but_does_not_work_is_restarted(running):
    async with await running.connect("admin", roles.Role.OPERATOR) as admin:

        async def processes() -> dict[str, bootstrap_client.ProcessRow]:
            return {row.name: row for row in await bootstrap_client.BootstrapClient(admin).processes()}

        async def all_run() -> bool:
            return all(process.pid for process in (await processes()).values())

        await eventually(all_run, timeout_s=30)
        before = await processes()
        await bootstrap_client.BootstrapClient(admin).kill("manager-2", number=signal.SIGSTOP)

        async def anew() -> bool:
            return (await processes())["manager-2"].pid not in (before["manager-2"].pid, None)

        await eventually(anew, timeout_s=60)
        after = await processes()
        others = {name: process.pid for name, process in before.items() if name != "manager-2"}
        assert {name: after[name].pid for name in others} == others, "the others were left alone"


def test_machines_that_run_one_domain_have_processes_of_different_names():
    def names(agent: str) -> set[str]:
        made = loader.load(app_settings.Settings, flags={"manage.agent_name": agent})
        return set(management._names(made.manage, made.manage.managers))

    assert names("local") == {"registry-1", "registry-2", "manager-1", "manager-2", "agent-local"}
    assert names("b") & (names("c") | names("local")) == set()
