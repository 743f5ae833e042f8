"""Third-party clients: pypsrp, pywinrm, and Debian's `wsl`."""

from __future__ import annotations

import asyncio
import os
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pypsrp.exceptions
import pypsrp.wsman
import pytest
import winrm.exceptions
import winrm.protocol
import xmltodict  # type: ignore[import-untyped]

from muster.gateways.wsman.wire import namespaces
from tests import debian
from tests.gateways.wsman.conftest import NAME, PASSWORD

pytestmark = [
    pytest.mark.may_leak("threads", "files", reason="the clients run in threads and keep connections"),
    pytest.mark.may_block(reason="they are not asyncio's"),
]
P = namespaces.RESOURCE
ENUMERATE = f"<n:Enumerate xmlns:n='{namespaces.WSEN}' xmlns:w='{namespaces.WSMAN}'>{{}}</n:Enumerate>"


def named(name: str) -> pypsrp.wsman.SelectorSet:
    chosen = pypsrp.wsman.SelectorSet()
    chosen.add_option("Name", name)
    return chosen


def text(element: ET.Element, name: str) -> str:
    matches = element.find(f".//{name}")
    assert matches is not None, ET.tostring(element)
    return matches.text or ""


async def test_pypsrp(wsman, create):
    await create("first", tier="front")

    def drive() -> None:
        with pypsrp.wsman.WSMan(
            "127.0.0.1",
            port=wsman.port,
            ssl=False,
            auth="basic",
            encryption="never",
            username=NAME,
            password=PASSWORD,
        ) as client:
            entry = client.get(P, None, selector_set=named("first"))
            assert text(entry, P("State")) == "up"

            resource = ET.fromstring(
                f"<p:Resource xmlns:p='{P}'><p:Name>second</p:Name><p:Type>memory</p:Type>"
                "<p:Agent>host-a</p:Agent></p:Resource>"
            )
            made = client.create(P, resource)
            assert text(made, namespaces.WSMAN("Selector")) == "second"
            with pytest.raises(pypsrp.exceptions.WSManFaultError) as caught:
                client.create(P, resource)
            assert "already" in str(caught.value)

            # Enumerated one by one, as for a client that requests no number.
            answer = client.enumerate(P, ET.fromstring(ENUMERATE.format("")))
            context, seen = text(answer, namespaces.WSEN("EnumerationContext")), []
            while context:
                pulled = client.pull(
                    P,
                    ET.fromstring(
                        f"<n:Pull xmlns:n='{namespaces.WSEN}'><n:EnumerationContext>{context}"
                        "</n:EnumerationContext></n:Pull>"
                    ),
                )
                seen += [element.text for element in pulled.iter(P("Name"))]
                more = pulled.find(f".//{namespaces.WSEN('EnumerationContext')}")
                context = (more.text or "") if more is not None else ""
            assert seen == ["first", "second"]
            optimised = "<w:OptimizeEnumeration/><w:MaxElements>10</w:MaxElements>"
            answer = client.enumerate(P, ET.fromstring(ENUMERATE.format(optimised)))
            assert [element.text for element in answer.iter(P("Name"))] == ["first", "second"]
            assert answer.find(f".//{namespaces.WSMAN('EndOfSequence')}") is not None

            # Put what was got, with another wish.
            body = client.get(P, None, selector_set=named("second")).find(f".//{P('Resource')}")
            assert body is not None
            desired = body.find(P("Desired"))
            assert desired is not None
            desired.text = "down"
            assert text(client.put(P, body, selector_set=named("second")), P("Desired")) == "down"

            argument = ET.fromstring(f"<p:echo_INPUT xmlns:p='{P}'><p:text>hello</p:text></p:echo_INPUT>")
            answer = client.invoke(f"{P}/echo", P, argument, selector_set=named("first"))
            assert text(answer, P("Result")) == "hello"
            renamed = ET.fromstring(
                f"<p:Rename_INPUT xmlns:p='{P}'><p:NewName>third</p:NewName></p:Rename_INPUT>"
            )
            answer = client.invoke(f"{P}/Rename", P, renamed, selector_set=named("first"))
            assert text(answer, namespaces.WSMAN("Selector")) == "third"

            client.delete(P, selector_set=named("second"))
            with pytest.raises(pypsrp.exceptions.WSManFaultError) as caught:
                client.get(P, None, selector_set=named("nobody"))
            assert "nobody" in str(caught.value)

    await asyncio.to_thread(drive)
    await wsman.fleet.client.wait_gone("second")
    assert await wsman.fleet.client.names() == ["third"]


async def test_pypsrp_subscribes(wsman, create, sink):
    await create("a")

    def client(work: Callable[[pypsrp.wsman.WSMan], Any]) -> Any:
        with pypsrp.wsman.WSMan(
            "127.0.0.1",
            port=wsman.port,
            ssl=False,
            auth="basic",
            encryption="never",
            username=NAME,
            password=PASSWORD,
        ) as made:
            return work(made)

    body = ET.fromstring(
        f"<e:Subscribe xmlns:e='{namespaces.WSE}' xmlns:a='{namespaces.WSA}'><e:Delivery><e:NotifyTo>"
        f"<a:Address>{sink.url}</a:Address></e:NotifyTo></e:Delivery><e:Expires>PT1M</e:Expires></e:Subscribe>"
    )
    answer = await asyncio.to_thread(client, lambda value: value.invoke(namespaces.SUBSCRIBE, P, body))
    assert text(answer, namespaces.WSE("Expires")) == "PT60S"
    assert text(answer, namespaces.WSE("Identifier")).startswith("uuid:")
    await wsman.fleet.client.put("a", desired="down")
    event = await sink.next()
    assert event.first is not None
    assert event.first.local == "StateChanged"


async def test_pywinrm(wsman, create):
    await create("first")
    endpoint = f"http://127.0.0.1:{wsman.port}/wsman"
    plain: dict[str, Any] = {"server_cert_validation": "ignore", "proxy": None}

    def drive() -> None:
        client = winrm.protocol.Protocol(
            endpoint, transport="basic", username=NAME, password=PASSWORD, **plain
        )

        def ask(action: str, body: dict[str, Any], name: str = "") -> dict[str, Any]:
            message = client.build_wsman_header(action, P)
            if name:
                message["env:Header"]["w:SelectorSet"] = {"w:Selector": {"@Name": "Name", "#text": name}}
            message["env:Body"] = body
            actual: dict[str, Any] = xmltodict.parse(
                client.send_message(xmltodict.unparse({"env:Envelope": message})),
                process_namespaces=True,
                namespaces={str(P): None, str(namespaces.WSMAN): "w", str(namespaces.WSEN): "n",
                            str(namespaces.WXF): "x",
                            "http://www.w3.org/2003/05/soap-envelope": "s"},
            )  # fmt: skip
            return dict(actual["s:Envelope"]["s:Body"] or {})

        assert ask(namespaces.GET, {}, "first")["Resource"]["State"] == "up"
        made = {"@xmlns:p": str(P), "p:Name": "second", "p:Type": "memory", "p:Agent": "host-a"}
        assert "x:ResourceCreated" in ask(namespaces.CREATE, {"p:Resource": made})
        optimised = {"@xmlns:n": str(namespaces.WSEN), "w:OptimizeEnumeration": None, "w:MaxElements": "10"}
        items = ask(namespaces.ENUMERATE, {"n:Enumerate": optimised})["n:EnumerateResponse"]["w:Items"][
            "Resource"
        ]
        assert [row["Name"] for row in items] == ["first", "second"]
        echo = {"p:echo_INPUT": {"@xmlns:p": str(P), "p:text": "hello"}}
        assert ask(f"{P}/echo", echo, "first")["echo_OUTPUT"]["Result"] == "hello"
        assert ask(namespaces.DELETE, {}, "second") == {}
        with pytest.raises(winrm.exceptions.WSManFaultError) as caught:
            ask(namespaces.GET, {}, "nobody")
        assert caught.value.fault_subcode == "wsa:DestinationUnreachable"
        stranger = winrm.protocol.Protocol(
            endpoint, transport="basic", username=NAME, password="wrong", **plain
        )
        with pytest.raises(winrm.exceptions.InvalidCredentialsError):
            stranger.send_message(
                xmltodict.unparse({"env:Envelope": stranger.build_wsman_header(namespaces.GET, P)})
            )

    await asyncio.to_thread(drive)
    await wsman.fleet.client.wait_gone("second")


async def test_wsl(wsman, create, tmp_path):
    debian.WSL.require()
    await create("first", tier="front")
    await create("second", tier="back")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "WSENDPOINT": f"127.0.0.1:{wsman.port}",
        "WSUSER": NAME,
        "WSPASS": PASSWORD,
        "WSNOSSL": "true",
        "WSAUTOMATED": "1",
        "KEEPHISTORY": "0",
    }

    async def run(*command: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, env=environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        async with asyncio.timeout(60):
            argument, _ = await process.communicate()
        assert process.returncode == 0, argument.decode()
        return argument.decode()

    uri = str(P)
    assert "ProductVendor" in await run("wslid", "ident")
    one_by_one = await run("wslenum", uri)
    assert one_by_one.count("<p:Resource>") == 2
    optimised = await run("wslenum", uri, "-opti", "10")
    assert optimised.count("<p:Resource>") == 2
    assert "EndpointReference" in await run("wslenum", uri, "-mode", "epr", "-opti", "10")
    filtered = await run("wslenum", uri, "-filter", "select * from Resource where tier='front'")
    assert "first" in filtered
    assert "second" not in filtered
    assert "<p:State>up</p:State>" in await run("wslget", uri, "Name=first")
    where = ("-filter", "select * from Resource where Name='first'")
    assert "hello" in await run("wslinvoke", uri, "echo", "text=hello", *where)
    assert "_OUTPUT" in await run("wslinvoke", uri, "Rename", "NewName=third", *where)
    assert await wsman.fleet.client.names() == ["second", "third"]
    await put(
        tmp_path, environment, uri, "Desired=down", "-filter", "select * from Resource where Name='second'"
    )
    assert (await wsman.fleet.client.describe("second")).desired == "down"
    await put(
        tmp_path,
        environment,
        uri,
        "Desired=up",
        "-fragment",
        "-filter",
        "select * from Resource where Name='second'",
    )
    assert (await wsman.fleet.client.describe("second")).desired == "up"


async def put(folder: Any, environment: dict[str, str], *arguments: str) -> None:
    """Its exit code says whether "_OUTPUT" is in the answer, which no answer to a Put is: look at that."""
    process = await asyncio.create_subprocess_exec(
        "wslput", *arguments, cwd=folder, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(60):
        argument, _ = await process.communicate()
    assert "PutResponse" in argument.decode(), argument.decode()
