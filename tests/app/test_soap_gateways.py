"""The SOAP gateways of a domain: passwords, roles, and callers with their own identities on the bus."""

from __future__ import annotations

import httpx
import pytest

from muster.app import domain
from muster.app import settings as app_settings
from muster.app.components import factories
from muster.core import errors
from muster.core.formats import xml
from muster.core.settings import loader
from muster.gateways.soap import envelope
from muster.gateways.wscontext import schema
from muster.gateways.wsman.wire import namespaces
from muster.manage import client
from muster.trust.permissions import roles

V12 = envelope.SoapVersion.V12
ACTIVITY = "<c:context><c:context-identifier>{}</c:context-identifier></c:context>"


async def ask(url: str, who: tuple[str, str], body: str, headers: str = "") -> httpx.Response:
    async with httpx.AsyncClient(timeout=40) as http:
        return await http.post(
            url,
            content=f'<s:Envelope xmlns:s="{V12.value}" xmlns:c="{schema.WSCTX}" xmlns:a="{namespaces.WSA}" '
            f'xmlns:w="{namespaces.WSMAN}" xmlns:p="{namespaces.RESOURCE}"><s:Header>{headers}</s:Header>'
            f"<s:Body>{body}</s:Body></s:Envelope>",
            headers={"content-type": V12.content_type},
            auth=who,
        )


def wsman(action: str, name: str = "") -> str:
    selector = f'<w:SelectorSet><w:Selector Name="Name">{name}</w:Selector></w:SelectorSet>' if name else ""
    return (
        f"<a:To>x</a:To><a:Action>{action}</a:Action><a:MessageID>uuid:1</a:MessageID>"
        f"<w:ResourceURI>{namespaces.RESOURCE}</w:ResourceURI><a:ReplyTo><a:Address>{namespaces.WSA}/role/anonymous"
        f"</a:Address></a:ReplyTo>{selector}"
    )


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_gateways_of_a_domain(tmp_path):
    flags = {
        "domain.data_dir": str(tmp_path),
        "soap.enabled": True,
        "soap.port": 0,
        "manage.enabled": True,
        "manage.registries": 1,
        "manage.managers": 1,
    }
    settings = loader.load(app_settings.Settings, flags=flags)
    ann, vic = ("ann", "a long secret"), ("vic", "another secret")
    async with domain.Domain(settings, components=factories.components(settings)) as running:
        url = running.url_of("soap")
        known = running.trust.passwords()
        known.set(ann[0], roles.Role.OPERATOR, ann[1])
        known.set(vic[0], roles.Role.VIEWER, vic[1])

        # WS-Context
        begun = await ask(f"{url}/context", ann, "<c:begin/>")
        assert begun.status_code == 200, begun.text
        document = xml.parse(begun.content)
        id = next(node.text for node in document.walk() if node.local == "context-identifier")
        about = ACTIVITY.format(id)
        assert "ACTIVE" in (await ask(f"{url}/context", vic, "<c:getStatus/>", about)).text
        for change in ("<c:begin/>", "<c:complete/>"):
            refused = await ask(f"{url}/context", vic, change, about)
            assert "noPermissionFault" in refused.text
        assert (await ask(f"{url}/context", ("ann", "a wrong secret"), "<c:begin/>")).status_code == 401
        assert (await ask(f"{url}/context", ("eve", "a long secret"), "<c:begin/>")).status_code == 401

        # WS-Management, and the audit has who it was
        resource = "<p:Name>r</p:Name><p:Type>memory</p:Type><p:Agent>local</p:Agent>"
        made = await ask(
            f"{url}/wsman", ann, f"<p:Resource>{resource}</p:Resource>", wsman(namespaces.CREATE)
        )
        assert "ResourceCreated" in made.text, made.text
        async with await running.connect("op", roles.Role.OPERATOR) as bus:
            fleet = client.ManageClient(bus)
            await fleet.wait("r", "up")
            assert (await fleet.describe("r")).applied_by == "ann"
        assert "<p:State>up" in (await ask(f"{url}/wsman", vic, "", wsman(namespaces.GET, "r"))).text
        refused = await ask(f"{url}/wsman", vic, "", wsman(namespaces.DELETE, "r"))
        assert "wsman:AccessDenied" in refused.text

        # A password that is changed or removed ends at once, remembered or not.
        known.set(vic[0], roles.Role.VIEWER, "yet another one")
        assert (await ask(f"{url}/wsman", vic, "", wsman(namespaces.GET, "r"))).status_code == 401
        known.remove(ann[0])
        assert (await ask(f"{url}/wsman", ann, "", wsman(namespaces.GET, "r"))).status_code == 401
        status = await running.status()
        assert {row["endpoint"] for row in status["soap"]} == {
            "/wsman",
            "/context",
            "/contextmanager",
            "/uddi",
        }


def test_callbacks_in_the_settings_are_checked():
    with pytest.raises(errors.InvalidInput, match="is not a valid callback address"):
        loader.load(app_settings.Settings, flags={"soap.callbacks": ["file:///etc/passwd"]})
