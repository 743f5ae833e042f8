"""Names of WS-Management: namespaces with the prefixes that clients expect, actions, dialects, and Muster's
own.
"""

from __future__ import annotations

from muster.core.formats import xml
from muster.gateways.soap import addresses, envelope

WSA = addresses.WSA04
WSMAN = xml.XmlNamespace("http://schemas.dmtf.org/wbem/wsman/1/wsman.xsd")
WSMID = xml.XmlNamespace("http://schemas.dmtf.org/wbem/wsman/identity/1/wsmanidentity.xsd")
WXF = xml.XmlNamespace("http://schemas.xmlsoap.org/ws/2004/09/transfer")
WSEN = xml.XmlNamespace("http://schemas.xmlsoap.org/ws/2004/09/enumeration")
WSE = xml.XmlNamespace("http://schemas.xmlsoap.org/ws/2004/08/eventing")

PREFIXES = {
    str(envelope.SoapVersion.V12.value): "s",
    WSA: "wsa",
    WSMAN: "wsman",
    WSMID: "wsmid",
    WXF: "wxf",
    WSEN: "wsen",
    WSE: "wse",
}  # and those of Muster, below

PREFIX = "http://schemas.dmtf.org/wbem/wsman/1/wsman"  # prefix of actions, details and modes
DETAIL = f"{PREFIX}/faultDetail/"

FAULT_ACTIONS = {
    WSMAN: f"{PREFIX}/fault",
    WSA: f"{WSA}/fault",
    WXF: f"{WXF}/fault",
    WSEN: f"{WSEN}/fault",
    WSE: f"{WSE}/fault",
}

GET, PUT, CREATE, DELETE = (f"{WXF}/{verb}" for verb in ("Get", "Put", "Create", "Delete"))
ENUMERATE, PULL, RELEASE = (f"{WSEN}/{verb}" for verb in ("Enumerate", "Pull", "Release"))
SUBSCRIBE, RENEW, GET_STATUS, UNSUBSCRIBE = (
    f"{WSE}/{verb}" for verb in ("Subscribe", "Renew", "GetStatus", "Unsubscribe")
)
GET_STATUS_MISSPELT = f"{WSE}/GetStaus"  # as one client sends it

PUSH = f"{WSE}/DeliveryModes/Push"
PUSH_WITH_ACK = f"{PREFIX}/PushWithAck"
ACK = f"{PREFIX}/Ack"
ACK_MISSPELT = "http://schemas.xmlsoap.org/wbmem/wsman/1/wsman/Ack"
SUBSCRIPTION_END = f"{WSE}/SubscriptionEnd"

XPATH = "http://www.w3.org/TR/1999/REC-xpath-19991116"
XPATH_1 = f"{PREFIX}/XPath_Level_1"
SELECTOR_FILTER = f"{PREFIX}/SelectorFilter"
QUERIES = (
    "http://schemas.dmtf.org/wbem/wsman/1/WQL",
    f"{PREFIX}/WQL",
    "http://schemas.microsoft.com/wbem/wsman/1/WQL",
    "http://schemas.dmtf.org/wbem/cql/1/dsp0202.pdf",
)

BASIC = f"{PREFIX}/secprofile/http/basic"
BASIC_TLS = f"{PREFIX}/secprofile/https/basic"

# Muster's own.
BASE = "urn:muster:manage:1"
PREDICATE = f"{BASE}/predicate"
RESOURCE = xml.XmlNamespace(f"{BASE}/Resource")
AGENT = xml.XmlNamespace(f"{BASE}/Agent")
MANAGER = xml.XmlNamespace(f"{BASE}/Manager")
KINDS = {
    RESOURCE: "Resource",
    AGENT: "Agent",
    MANAGER: "Manager",
}  # names of their elements: the last part of the URI, for `wsl`
PREFIXES |= {
    RESOURCE: "p",
    AGENT: "a",
    MANAGER: "m",
}  # declared at the root: some clients look for `<p:Resource>`
