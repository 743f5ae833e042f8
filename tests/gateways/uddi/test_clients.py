"""Third-party clients: zeep, and npm's soap where npm can fetch it."""

from __future__ import annotations

import asyncio
import json
import pathlib
import shutil
import subprocess
from typing import Any

import pytest
import requests
import zeep
from lxml import etree

CACHE = pathlib.Path.home() / ".cache" / "muster" / "npm"

SCRIPT = """
const soap = require('soap');
(async () => {
  const url = process.argv[2];
  const client = await soap.createClientAsync(url + '/uddi?wsdl');
  const at = name => client['UDDI_Service']['UDDI_' + name + '_Port'];
  const call = (name, operation, asked) => new Promise((done, failed) =>
    at(name)[operation](asked, (error, result) => error ? failed(error) : done(result)));
  const { authInfo } = await call('Security', 'get_authToken',
    { attributes: { userID: 'ann', cred: 'open-sesame' } });
  const saved = await call('Publication', 'save_business',
    { authInfo, businessEntity: [{ name: [{ attributes: { 'xml:lang': 'en' }, $value: 'Node Works' }] }] });
  const found = await call('Inquiry', 'find_business', { name: [{ $value: 'Node Works' }] });
  let code = '';
  try {
    await call('Inquiry', 'get_businessDetail', { businessKey: ['uddi:no:such'] });
  } catch (error) {
    code = JSON.stringify(error.root.Envelope.Body.Fault.detail);
  }
  console.log(JSON.stringify({
    saved: [].concat(saved.businessEntity)[0].attributes.businessKey,
    found: [].concat(found.businessInfos.businessInfo).map(one => one.attributes.businessKey), code }));
})().catch(error => { console.error(error); process.exit(1); });
"""


def with_zeep(url: str) -> dict[str, Any]:
    with requests.Session() as session:
        transport = zeep.Transport(session=session)  # type: ignore[no-untyped-call]
        client = zeep.Client(f"{url}/uddi/inquiry?wsdl", transport=transport)  # type: ignore[no-untyped-call]
        return zeeped(client)


def zeeped(client: Any) -> dict[str, Any]:
    inquiry, publication, security = (
        client.bind("UDDI_Service", f"UDDI_{name}_Port") for name in ("Inquiry", "Publication", "Security")
    )
    token = security.get_authToken(userID="ann", cred="open-sesame")
    saved = publication.save_business(
        authInfo=token,
        businessEntity=[
            {
                "name": [{"_value_1": "Zeep Works", "lang": "en"}],
                "businessServices": {
                    "businessService": [
                        {
                            "name": [{"_value_1": "snakes"}],
                            "bindingTemplates": {
                                "bindingTemplate": [
                                    {
                                        "accessPoint": {
                                            "_value_1": "http://127.0.0.1:1/",
                                            "useType": "endPoint",
                                        }
                                    }
                                ]
                            },
                        }
                    ]
                },
            }
        ],
    )
    (business,) = saved.businessEntity
    element = inquiry.find_service(
        findQualifiers={"findQualifier": ["approximateMatch", "caseInsensitiveMatch"]},
        name=[{"_value_1": "SNAKE%"}],
    )
    detail = inquiry.get_businessDetail(businessKey=[business.businessKey])
    refused = ""
    try:
        publication.delete_business(authInfo="wrong", businessKey=[business.businessKey])
    except zeep.exceptions.Fault as fault:  # not held on to: it would keep the connection
        refused = etree.tostring(fault.detail).decode()
    done = publication.delete_business(authInfo=token, businessKey=[business.businessKey])
    security.discard_authToken(authInfo=token)
    return {
        "language": business.name[0].lang,
        "service": business.businessServices.businessService[0].serviceKey,
        "found": [item.serviceKey for item in element.serviceInfos.serviceInfo],
        "again": detail.businessEntity[0].name[0]._value_1,
        "refused": refused,
        "done": done,
        "left": inquiry.find_business(name=[{"_value_1": "Zeep Works"}]).businessInfos,
    }


async def test_zeep_publishes_finds_and_deletes(uddi):
    done = await asyncio.to_thread(with_zeep, uddi.url)
    assert done["found"] == [done["service"]]
    assert (done["language"], done["again"], done["done"], done["left"]) == ("en", "Zeep Works", None, None)
    assert "E_authTokenRequired" in done["refused"]


def npm_soap() -> pathlib.Path:
    """Where ``require('soap')`` finds it."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no node")
    if not (CACHE / "node_modules" / "soap").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        got = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(CACHE), "soap@1"],
            capture_output=True,
            timeout=120,
            check=False,
        )
        if got.returncode:
            pytest.skip(f"npm cannot fetch soap: {got.stderr.decode()[-200:]}")
    return CACHE


@pytest.mark.slow
async def test_npm_soap_publishes_and_finds(uddi, tmp_path):
    folder = await asyncio.to_thread(npm_soap)
    script = tmp_path / "uddi.js"
    script.write_text(SCRIPT)
    process = await asyncio.create_subprocess_exec(
        "node",
        str(script),
        uddi.url,
        env={"NODE_PATH": str(folder / "node_modules"), "PATH": "/usr/bin:/bin:/usr/local/bin"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, output = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()
    done = json.loads(out)
    assert done["found"] == [done["saved"]]
    assert "E_invalidKeyPassed" in done["code"]
