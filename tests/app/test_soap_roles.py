"""Each role at each SOAP operation, against the process that a domain starts for them.

A new operation has no line in the tables below, and fails here until the table says which roles may call it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
import pytest

from muster.app import domain
from muster.app import settings as app_settings
from muster.app.components import factories, supervised
from muster.bus.client import client
from muster.core import messages
from muster.core.formats import xml
from muster.core.settings import loader
from muster.gateways.soap import envelope
from muster.gateways.uddi.model import schema as uddi_schema
from muster.gateways.wscontext import schema as context_schema
from muster.gateways.wsman.wire import namespaces
from muster.testing.eventually import eventually
from muster.trust.permissions import roles

U, W, P = uddi_schema.UDDI, context_schema.WSCTX, namespaces.RESOURCE
V11, V12 = envelope.SoapVersion.V11, envelope.SoapVersion.V12
ROLES = ("anonymous", "viewer", "user", "agent", "operator")
PASSWORD = "a long secret"
NO_ACTIVITY = "urn:uuid:00000000-0000-4000-8000-000000000000"

# By role, in the order of ROLES: "-" is refused for want of a login, "x" for want of rights, "n" is not
# found, "y" is done.
WSMAN = {
    "Identify": "yyyyy",
    namespaces.GET: "-yyxy",
    namespaces.ENUMERATE: "-yyyy",  # what it lists is requested by Pull
    namespaces.PULL: "-yyxy",
    namespaces.RELEASE: "-yyyy",
    namespaces.SUBSCRIBE: "-yyyy",  # to an address that the settings allow; it receives what its role reads
    namespaces.RENEW: "-yyyy",  # its own only
    namespaces.GET_STATUS: "-yyyy",
    namespaces.GET_STATUS_MISSPELT: "-yyyy",
    namespaces.UNSUBSCRIBE: "-yyyy",
    namespaces.PUT: "-xxxy",
    namespaces.CREATE: "-xxxy",
    namespaces.DELETE: "-xxxy",
    f"{P}/restart": "-xxxy",
}
CONTEXT = {
    "begin": "-xyxy",
    "complete": "-xyxy",
    "getStatus": "-yyyy",
    "setTimeout": "-yyyy",  # for one's own activities
    "getTimeout": "-yyyy",
    "getContents": "-yyyy",
    "setContents": "-xyxy",
}
_READS, _WRITES, _OF_OPERATOR = "yyyyy", "-xyxy", "-xxxy"
UDDI = {
    **dict.fromkeys(uddi_schema.ports()["Inquiry"], _READS),
    **dict.fromkeys(("save_business", "save_service", "save_tModel"), _WRITES),
    "save_binding": _OF_OPERATOR,  # into the operator's service
    **{f"delete_{kind}": _OF_OPERATOR for kind in ("business", "service", "binding", "tModel")},
    "add_publisherAssertions": _OF_OPERATOR,  # about the operator's businesses
    "set_publisherAssertions": _OF_OPERATOR,
    "delete_publisherAssertions": "-nnny",  # not found: each publisher has its own
    "get_publisherAssertions": "-yyyy",
    "get_assertionStatusReport": "-yyyy",
    "get_registeredInfo": "-yyyy",
    "get_authToken": "-yyyy",
    "discard_authToken": "-yyyy",
}


@dataclass
class Soap:
    """Calls as each of the roles."""

    url: str
    http: httpx.AsyncClient
    tokens: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    async def post(
        self, path: str, role: str, data: str, version: envelope.SoapVersion = V12
    ) -> httpx.Response:
        headers = {"content-type": version.content_type}
        if role != "anonymous" and path != "/uddi":
            headers["authorization"] = f"Basic {base64.b64encode(f'{role}:{PASSWORD}'.encode()).decode()}"
        return await self.http.post(f"{self.url}{path}", content=data, headers=headers)

    async def wsman(self, action: str, role: str, new: str = "") -> httpx.Response:
        """``new``: the name of a resource to create."""
        body, name, more = "", "", ""
        match action:
            case "Identify":
                return await self.post(
                    "/wsman", role, enveloped(f'<i:Identify xmlns:i="{namespaces.WSMID}"/>')
                )
            case namespaces.ENUMERATE:
                body = "<n:Enumerate/>"
            case namespaces.PULL | namespaces.RELEASE:
                tag = action.rpartition("/")[2]
                begun = await self.wsman(namespaces.ENUMERATE, role)
                context = re.findall(r"EnumerationContext>([^<]*)<", begun.text)
                body = f"<n:{tag}><n:EnumerationContext>{''.join(context)}</n:EnumerationContext></n:{tag}>"
            case namespaces.SUBSCRIBE:
                sink = "<e:NotifyTo><a:Address>http://127.0.0.1:9/sink</a:Address></e:NotifyTo>"
                body = f"<e:Subscribe><e:Delivery>{sink}</e:Delivery></e:Subscribe>"
            case (
                namespaces.RENEW
                | namespaces.UNSUBSCRIBE
                | namespaces.GET_STATUS
                | namespaces.GET_STATUS_MISSPELT
            ):
                begun = await self.wsman(namespaces.SUBSCRIBE, role)
                id = re.findall(r"Identifier>([^<]*)<", begun.text)
                tag = {namespaces.RENEW: "Renew", namespaces.UNSUBSCRIBE: "Unsubscribe"}.get(
                    action, "GetStatus"
                )
                body, more = f"<e:{tag}/>", f"<e:Identifier>{''.join(id)}</e:Identifier>"
            case namespaces.CREATE:
                body = resource(new or f"of-{role}")
            case namespaces.PUT:
                name, body = "r", resource("r", "down")
            case _:
                name = "gone" if action == namespaces.DELETE else "r"
        selector = f'<w:SelectorSet><w:Selector Name="Name">{name}</w:Selector></w:SelectorSet>'
        headers = (
            f"<a:To>x</a:To><a:Action>{action}</a:Action><a:MessageID>uuid:1</a:MessageID>"
            f"<w:ResourceURI>{P}</w:ResourceURI><a:ReplyTo><a:Address>{namespaces.WSA}/role/anonymous</a:Address>"
            f"</a:ReplyTo>{selector if name else ''}{more}"
        )
        return await self.post("/wsman", role, enveloped(body, headers))

    async def context(self, operation: str, role: str) -> httpx.Response:
        inside = {
            "setContents": '<x xmlns="urn:x"/>',
            "setTimeout": "<c:timeout>60</c:timeout>",
        }.get(operation, "")
        id = NO_ACTIVITY
        if operation not in ("begin", "setTimeout", "getTimeout") and role != "anonymous":
            begun = await self.context("begin", role if role not in ("viewer", "agent") else "user")
            id = next(
                node.text for node in xml.parse(begun.content).walk() if node.local == "context-identifier"
            )
        about = f"<c:context><c:context-identifier>{id}</c:context-identifier></c:context>"
        path = "/contextmanager" if operation in context_schema.MANAGER else "/context"
        body = f"<c:{operation}>{inside}</c:{operation}>"
        return await self.post(path, role, enveloped(body, "" if operation == "begin" else about))

    async def uddi(self, operation: str, role: str) -> httpx.Response:
        body, attributes = self._message(operation, role)
        needs = operation not in uddi_schema.ports()["Inquiry"] and operation != "get_authToken"
        token = f"<authInfo>{self.tokens.get(role, '')}</authInfo>" if needs else ""
        if operation == "discard_authToken" and role != "anonymous":
            token = f"<authInfo>{await self.token(role)}</authInfo>"
        return await self.say(f"<{operation}{attributes}>{token}{body}</{operation}>")

    async def say(self, request: str) -> httpx.Response:
        spelt = re.sub(r"<(/?)([A-Za-z])", r"<\1u:\2", request)
        return await self.post("/uddi", "", enveloped(spelt, version=V11), V11)

    async def token(self, role: str) -> str:
        answer = await self.say(f'<get_authToken userID="{role}" cred="{PASSWORD}"/>')
        return next(node.text for node in xml.parse(answer.content).walk() if node.local == "authInfo")

    def _message(self, operation: str, role: str) -> tuple[str, str]:
        """The content, and the attributes."""
        key, kinds = self.keys, {"business": "business", "service": "service", "binding": "binding"}
        kinds |= {"tModel": "tmodel"}
        verb, _, what = operation.partition("_")
        binding = "<accessPoint>http://127.0.0.1:9/</accessPoint>"
        assertion = (
            f"<publisherAssertion><fromKey>{key['business']}</fromKey><toKey>{key['business2']}</toKey>"
            '<keyedReference tModelKey="uddi:uddi.org:relationships" keyName="a" keyValue="peer-peer"/>'
            "</publisherAssertion>"
        )
        if what in ("publisherAssertions", "authToken") or operation == "get_registeredInfo":
            named = f' userID="{role}" cred="{PASSWORD}"' if operation == "get_authToken" else ""
            chosen = ' infoSelection="all"' if what == "registeredInfo" else ""
            return (assertion if verb in ("add", "set", "delete") else ""), named or chosen
        if verb == "save":
            return {
                "business": f"<businessEntity><name>b {role}</name></businessEntity>",
                "service": f"<businessService><name>s {role}</name></businessService>",
                "tModel": f"<tModel><name>t {role}</name></tModel>",
                "binding": f'<bindingTemplate serviceKey="{key["service"]}">{binding}</bindingTemplate>',
            }[what], ""
        if verb == "delete":
            return f"<{what}Key>{key[f'{kinds[what]} to delete']}</{what}Key>", ""
        if verb == "find":
            if what == "relatedBusinesses":
                return f"<businessKey>{key['business']}</businessKey>", ""
            named = f' serviceKey="{key["service"]}"' if what == "binding" else ""
            return ("" if what == "binding" else "<name>x</name>"), named
        what = what.removesuffix("Detail")
        if what == "operationalInfo":
            return f"<entityKey>{key['service']}</entityKey>", ""
        if what in kinds:
            return f"<{what}Key>{key[kinds[what]]}</{what}Key>", ""
        return "", ""


def enveloped(body: str, headers: str = "", version: envelope.SoapVersion = V12) -> str:
    return (
        f'<s:Envelope xmlns:s="{version.value}" xmlns:c="{W}" '
        f'xmlns:a="{namespaces.WSA}" xmlns:w="{namespaces.WSMAN}" '
        f'xmlns:n="{namespaces.WSEN}" xmlns:e="{namespaces.WSE}" xmlns:p="{P}" xmlns:u="{U}">'
        f"<s:Header>{headers}</s:Header><s:Body>{body}</s:Body></s:Envelope>"
    )


def resource(name: str, desired: str = "up") -> str:
    return (
        f"<p:Resource><p:Name>{name}</p:Name><p:Type>memory</p:Type><p:Agent>local</p:Agent>"
        f"<p:Desired>{desired}</p:Desired></p:Resource>"
    )


def outcome(answer: httpx.Response) -> str:
    """One of the letters of the tables; a fault of another kind is shown whole."""
    if answer.status_code == 401:
        return "-"
    actual = envelope.read(xml.parse(answer.content)).first if answer.content else None
    if actual is None or actual.local != "Fault":
        return "y" if answer.status_code == 200 else answer.text
    if any(word in answer.text for word in ("wsman:AccessDenied", "noPermissionFault", "E_userMismatch")):
        return "x"
    if "E_assertionNotFound" in answer.text:
        return "n"
    if "E_authTokenRequired" in answer.text or "E_unknownUser" in answer.text:
        return "-"
    return answer.text


async def check(table: Mapping[str, str], call: object) -> dict[str, str]:
    assert callable(call)
    made = {}
    for operation in table:
        # The operator comes last: it deletes what the others may not.
        others = await asyncio.gather(*(call(operation, role) for role in ROLES[:-1]))
        made[operation] = "".join(map(outcome, (*others, await call(operation, ROLES[-1]))))
    return {name: f"{made[name]} instead of {table[name]}" for name in table if made[name] != table[name]}


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_each_role_at_each_soap_operation(tmp_path):
    flags = {
        "domain.data_dir": str(tmp_path),
        "soap.enabled": True,
        "soap.port": 0,
        "soap.callbacks": ["http://127.0.0.1:9/sink"],
        "manage.enabled": True,
        "manage.registries": 1,
        "manage.managers": 1,
        "web.enabled": False,
    }
    settings = loader.load(app_settings.Settings, flags=flags)
    async with (
        domain.Domain(settings, components=factories.components(settings)) as running,
        httpx.AsyncClient(timeout=40) as http,
    ):
        part = running.component(supervised.SupervisedComponent)
        for role in ROLES[1:]:
            running.trust.passwords().set(role, roles.Role.named(role), PASSWORD)
        soap = Soap(part.url, http)
        for name in ("r", "gone"):
            assert outcome(await soap.wsman(namespaces.CREATE, "operator", name)) == "y"
        assert await check(WSMAN, soap.wsman) == {}
        assert await check(CONTEXT, soap.context) == {}

        soap.tokens = {role: await soap.token(role) for role in ROLES[1:]}
        await publish(soap)
        assert await check(UDDI, soap.uddi) == {}

        # A process of its own, which is started anew when it ends.
        (pid,) = part.pids
        assert pid != os.getpid()
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: part.pids not in ([], [pid]))
        assert outcome(await soap.wsman("Identify", "anonymous")) == "y"
        # A failed login is in the audit.
        assert outcome(await soap.post("/wsman", "eve", "")) == "-"
        running.trust.issue("reader", roles.Role.OPERATOR)  # whose the audit is to read
        async with await client.connect(running.servers, creds=running.trust.credentials("reader")) as reader:
            stream = await reader.open_stream(messages.DECISIONS_STREAM)

            async def audited() -> bool:
                actual = await stream.last_for("muster.audit.log.decision.login")
                return actual is not None and b"wrong name or password, from 127.0.0.1" in actual.data

            await eventually(audited)


async def publish(soap: Soap) -> None:
    """What the operator owns."""

    async def saved(operation: str, body: str, key: str) -> str:
        token = f"<authInfo>{soap.tokens['operator']}</authInfo>"
        answer = await soap.say(f"<{operation}>{token}{body}</{operation}>")
        assert outcome(answer) == "y", answer.text
        return next(str(node.get(key)) for node in xml.parse(answer.content).walk() if node.get(key))

    point = "<accessPoint>http://127.0.0.1:9/</accessPoint>"
    for suffix in ("", " to delete"):
        business = "<businessEntity><name>b</name></businessEntity>"
        service = "<businessService><name>s</name></businessService>"
        soap.keys[f"business{suffix}"] = await saved("save_business", business, "businessKey")
        soap.keys[f"service{suffix}"] = await saved("save_service", service, "serviceKey")
        soap.keys[f"tmodel{suffix}"] = await saved(
            "save_tModel", "<tModel><name>t</name></tModel>", "tModelKey"
        )
        of = f'<bindingTemplate serviceKey="{soap.keys["service"]}">{point}</bindingTemplate>'
        soap.keys[f"binding{suffix}"] = await saved("save_binding", of, "bindingKey")
    other = "<businessEntity><name>b2</name></businessEntity>"
    soap.keys["business2"] = await saved("save_business", other, "businessKey")


def test_the_tables_have_every_operation():
    from muster.gateways.wsman import endpoint

    made = endpoint.WsManEndpoint(None)  # type: ignore[arg-type]
    assert {*made._reads, *made._changes} == set(WSMAN) - {"Identify", f"{P}/restart"}
    assert {*context_schema.SERVICE, *context_schema.MANAGER} == set(CONTEXT)
    assert {name for port in uddi_schema.ports().values() for name in port} == set(UDDI)
