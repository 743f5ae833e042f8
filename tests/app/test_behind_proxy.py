"""A machine that reaches one address only, through a proxy, joins the domain and works."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.app import domain, enrolment, home
from muster.app import settings as app_settings
from muster.app.components import bootstrap_client
from muster.app.machines import join_client
from muster.bus import api
from muster.core import errors
from muster.core.settings import loader
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests.app import test_three_machines
from tests.manage import test_ways

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200), pytest.mark.may_block(reason="it reads files")]


async def test_a_machine_behind_a_proxy_joins_and_uses_only_the_address_of_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    web_socket = ("bus.websocket=true", "bus.websocket_port=443")
    monkeypatch.setattr(test_three_machines, "SETTINGS", (*test_three_machines.SETTINGS, *web_socket))
    machines = test_three_machines.Machines(tmp_path)
    await machines.init()
    url = f"wss://{machines.address('a')}:443"
    try:
        async with await machines.running["a"].connect("admin", roles.Role.OPERATOR) as admin:
            client = bootstrap_client.BootstrapClient(admin)
            tokens = [
                enrolment.EnrolmentToken.parse(
                    (await client.token("", machine_roles=chosen, servers=[url])).token
                )
                for chosen in (("agent",), ("broker", "agent"))
            ]
        place = home.Home(tmp_path / "d")
        async with test_ways.RecordingProxy() as proxy:
            with pytest.raises(errors.Refused, match="behind a proxy cannot run a broker"):
                await join_client.join(
                    place,
                    tokens[1],
                    machines.choices("d"),
                    waiting=print,
                    proxy=f"http://127.0.0.1:{proxy.port}",
                )
            here = await join_client.join(
                place, tokens[0], machines.choices("d"), waiting=print, proxy=f"http://127.0.0.1:{proxy.port}"
            )
            assert here.name == "d"
            settings = loader.load(
                app_settings.Settings, file=place.settings_file, flags={"health.enabled": False}
            )
            before = len(proxy.asked)
            async with domain.Domain(settings) as running:
                assert running.servers == (url,)
                assert running.bus.state is api.ConnectionState.CONNECTED

                async def reports() -> bool:
                    async with await machines.running["a"].connect("admin", roles.Role.OPERATOR) as bus:
                        rows = await bootstrap_client.BootstrapClient(bus).machines()
                    return [row.state for row in rows] == ["up", "up"]

                await eventually(reports, timeout_s=30)
                assert running.servers == (url,), "the list of machines does not replace it"
            assert len(proxy.asked) > before
    finally:
        await machines.stop("a")
