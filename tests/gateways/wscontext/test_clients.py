"""Two independent SOAP stacks read our WSDL and use it: zeep, and npm's `soap`."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests
import requests.auth
import zeep
import zeep.exceptions
import zeep.transports
from lxml import etree

from muster.testing.plugin import require_part
from tests.gateways.wscontext.conftest import NAME, PASSWORD, WSCTX

pytestmark = [
    pytest.mark.may_leak("threads", "files", reason="the clients run in threads and keep connections"),
    pytest.mark.may_block(reason="they are not asyncio's"),
]
untyped: Any = zeep  # it has no types


@pytest.mark.parametrize("binding", ["Soap11", "Soap12"])
async def test_zeep(wscontext, binding):
    def drive() -> None:
        with requests.Session() as session:
            session.auth = requests.auth.HTTPBasicAuth(NAME, PASSWORD)
            transport = untyped.transports.Transport(session=session)
            made = untyped.Client(f"{wscontext.url}/context?wsdl", transport=transport)
            service = made.bind("ContextServiceService", f"ContextService{binding}Port")
            manager = untyped.Client(f"{wscontext.url}/contextmanager?wsdl", transport=transport).bind(
                "ContextManagerService", f"ContextManager{binding}Port"
            )
            context = made.get_element(f"{{{WSCTX}}}context")

            def about(id: str) -> list[object]:
                return [context(**{"context-identifier": id})]

            assert service.getTimeout() == 3600
            service.setTimeout(timeout=120)
            assert service.getTimeout() == 120
            begun = service.begin()
            id = begun["context-identifier"]
            child = service.begin(_soapheaders=about(id))
            assert child["parent-context"]["context-identifier"] == id
            assert service.getStatus(_soapheaders=about(id)) == "ACTIVE"
            content = etree.fromstring("<g:group xmlns:g='urn:g'><g:name>maps</g:name></g:group>")
            manager.setContents(_value_1=[content], _soapheaders=about(id))
            getContents = manager.getContents(_soapheaders=about(id))
            assert getContents["context-identifier"] == id
            assert etree.tostring(getContents["_value_1"][0]).count(b"maps") == 1
            with pytest.raises(zeep.exceptions.Fault) as caught:
                service.complete(_soapheaders=about(id))
            assert b"childActivityPendingFault" in etree.tostring(caught.value.detail)
            service.complete(_soapheaders=about(child["context-identifier"]))
            service.complete(_soapheaders=about(id))
            assert service.getStatus(_soapheaders=about(id)) == "COMPLETED"

    await asyncio.to_thread(drive)


NPM_SOAP = "soap@1.13.0"
SCRIPT = """
const soap = require('soap');
const [url, manager, name, password] = process.argv.slice(2);
const ns = '%s';
const header = id =>
  `<w:context xmlns:w="${ns}"><w:context-identifier>${id}</w:context-identifier></w:context>`;
(async () => {
  const headers = {Authorization: 'Basic ' + Buffer.from(name + ':' + password).toString('base64')};
  const open = async at => {
    const client = await soap.createClientAsync(at + '?wsdl', {wsdl_headers: headers});
    client.setSecurity(new soap.BasicAuthSecurity(name, password));
    return client;
  };
  const service = await open(url), contexts = await open(manager), results = {};
  const about = (client, id) => { client.clearSoapHeaders(); if (id) client.addSoapHeader(header(id)); };
  const [begun] = await service.beginAsync({timeout: 600});
  const id = begun.context['context-identifier'];
  results.id = id;
  about(service, id);
  const [inner] = await service.beginAsync({});
  results.parent = inner.context['parent-context']['context-identifier'];
  const [status] = await service.getStatusAsync({});
  results.status = status;
  about(contexts, id);
  const group = '<g:group xmlns:g="urn:g"><g:name>maps</g:name></g:group>';
  await contexts.setContentsAsync({_xml: `<w:setContents xmlns:w="${ns}">${group}</w:setContents>`});
  const [, raw] = await contexts.getContentsAsync({});
  results.contents = raw;
  try { await service.completeAsync({}); } catch (error) { results.fault = error.body || String(error); }
  about(service, inner.context['context-identifier']);
  await service.completeAsync({});
  about(service, id);
  await service.completeAsync({});
  const [after] = await service.getStatusAsync({});
  results.after = after;
  const [timeout] = await service.getTimeoutAsync({});
  results.timeout = timeout;
  console.log(JSON.stringify(results));
})().catch(error => { console.error(error.body || error); process.exit(1); });
"""


def npm_soap() -> Path | None:
    """The folder of the installed package, kept from run to run; None where it cannot be had."""
    folder = Path.home() / ".cache" / "muster" / "npm-soap-1.13.0"
    if not (folder / "node_modules" / "soap" / "package.json").exists():
        if shutil.which("npm") is None or shutil.which("node") is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", NPM_SOAP]
        subprocess.run(command, cwd=folder, capture_output=True, timeout=110, check=False)
    return folder if (folder / "node_modules" / "soap" / "package.json").exists() else None


async def test_npm_soap(wscontext):
    folder = await asyncio.to_thread(npm_soap)
    require_part("npm's soap", folder, hint="needs node, npm and a network the first time")
    assert folder is not None
    script = folder / "drive.js"
    script.write_text(SCRIPT % WSCTX)
    process = await asyncio.create_subprocess_exec(
        "node", str(script), f"{wscontext.url}/context", f"{wscontext.url}/contextmanager", NAME, PASSWORD,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        output, faults = await process.communicate()
    assert process.returncode == 0, faults.decode()
    document = json.loads(output)
    assert document["id"].startswith("urn:uuid:")
    assert document["parent"] == document["id"]
    assert (document["status"], document["after"]) == ("ACTIVE", "COMPLETED")
    assert "maps" in document["contents"]
    assert "childActivityPendingFault" in document["fault"]
    assert int(document["timeout"]) == 3600
