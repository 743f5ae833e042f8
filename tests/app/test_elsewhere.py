"""External brokers accept the domain's identities with the output of `muster broker trust`."""

from __future__ import annotations

import socket
from pathlib import Path

from muster.app import domain, home
from muster.app import settings as app_settings
from muster.app.components import factories
from muster.bus import api
from muster.bus.brokers import binary
from muster.core.settings import loader
from muster.testing import child_process
from muster.trust.permissions import roles
from tests.cli import driver

CONFIG = """
server_name: a
listen: 127.0.0.1:{port}
include trust.conf
jetstream {{ store_dir: "{folder}/data", sync_interval: always }}
"""


async def test_a_domain_on_an_external_broker(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = home.Home(tmp_path / "home")
    options = ("--set", f"bus.servers=nats://127.0.0.1:{port}")
    assert driver.quick("init", "--name", "fleet", *options, home=place.root).code == 0
    result = driver.quick("broker", "trust", home=place.root)
    assert result.code == 0, result.err
    (tmp_path / "trust.conf").write_text(result.out)
    (tmp_path / "nats.conf").write_text(CONFIG.format(port=port, folder=tmp_path))
    program = (await binary.find()).path
    async with await child_process.start(program, "-c", tmp_path / "nats.conf") as server:
        await server.line("Server is ready", timeout_s=30)
        settings = loader.load(app_settings.Settings, file=place.settings_file)
        async with domain.Domain(settings, components=factories.components(settings)) as running:
            assert running.ready
            assert running.brokers is None
            async with (
                await running.connect("alice", roles.Role.USER) as alice,
                await running.connect("op", roles.Role.OPERATOR) as op,
            ):
                stream = await op.stream(api.StreamSettings("s", ("topic.s",), max_bytes=1 << 20))
                await alice.publish("topic.s", b"x")
                await alice.flush()
                assert (await stream.get(1)).data == b"x"
