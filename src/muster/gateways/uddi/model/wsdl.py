"""The description of the UDDI endpoints: the standard's files, and where this registry serves its APIs."""

from __future__ import annotations

import html

from muster.gateways.uddi.model import schema

#: The path of the standard's files, below that of the endpoint. They import each other by relative paths.
FILES = {
    f"/oasis/{path.relative_to(schema.FOLDER)}": path for path in sorted(schema.FOLDER.glob("**/*.*sd*"))
}

_SERVICE = """<?xml version="1.0" encoding="UTF-8"?>
<definitions xmlns="http://schemas.xmlsoap.org/wsdl/" xmlns:soap="http://schemas.xmlsoap.org/wsdl/soap/"
    xmlns:uddi="urn:uddi-org:api_v3_binding" targetNamespace="urn:uddi-org:v3_service">
  <import namespace="urn:uddi-org:api_v3_binding" location="{address}/oasis/uddi_api_v3_binding.wsdl"/>
  <service name="UDDI_Service">{ports}
  </service>
</definitions>
"""
_PORT = """
    <port name="UDDI_{name}_Port" binding="uddi:UDDI_{name}_SoapBinding">
      <soap:address location="{address}/{path}"/>
    </port>"""


def wsdl(address: str) -> bytes:
    """The description of all endpoints, each at ``address`` and its name."""
    quoted = html.escape(address, quote=True)
    ports = "".join(_PORT.format(name=name, address=quoted, path=name.lower()) for name in schema.ports())
    return _SERVICE.format(address=quoted, ports=ports).encode("ascii", "xmlcharrefreplace")
