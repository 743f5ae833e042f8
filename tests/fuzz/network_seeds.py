"""Correct inputs of network endpoints, which `network` changes at random."""

from __future__ import annotations

import base64

from tests.fuzz import endpoints

LOCATOR = [
    endpoints.HttpSeed("GET", "/locate"),
    endpoints.HttpSeed("GET", "/locate?count=3&zone=default&tls=true"),
    endpoints.HttpSeed("GET", "/livez"),
]
HEALTH = [
    endpoints.HttpSeed("GET", "/livez"),
    endpoints.HttpSeed("GET", "/readyz"),
    endpoints.HttpSeed("GET", "/metrics", (("accept", "application/openmetrics-text"),)),
    endpoints.HttpSeed("GET", "/status"),
]
_JSON, _PROTOBUF = (("content-type", "application/json"),), (("content-type", "application/x-protobuf"),)
_OTLP = (
    b'{"resourceMetrics":[{"resource":{"attributes":[{"key":"service.name","value":{"stringValue":"shop"}}]},'
    b'"scopeMetrics":[{"metrics":[{"name":"orders","sum":{"aggregationTemporality":2,"isMonotonic":true,'
    b'"dataPoints":[{"asInt":"5","timeUnixNano":"1700000000000000000"}]}}]}]}]}'
)
_OTLP_PROTOBUF = base64.b64decode("CjAKGgoYCgxzZXJ2aWNlLm5hbWUSCAoGc2hvcF8xEhISEAoGb3JkZXJzKgYKBDEFAAAA")
_REMOTE_WRITE = bytes([0x1A, 0x64]) + (b"\n\x18\n\x11\n\x08__name__\x12\x05total\x12\x03\x09\x01\x02")
INTAKE = [
    endpoints.HttpSeed(
        "POST",
        "/report?period=10s",
        _JSON,
        b'{"name":"shop","state":"up","reason":"","metrics":{"orders":5.0}}',
    ),
    endpoints.HttpSeed("POST", "/v1/metrics", _JSON, _OTLP),
    endpoints.HttpSeed("POST", "/v1/metrics", _PROTOBUF, _OTLP_PROTOBUF),
    endpoints.HttpSeed("POST", "/api/v1/write", (("content-encoding", "snappy"),), _REMOTE_WRITE),
    endpoints.HttpSeed("POST", "/report", (("content-type", "text/xml"),), b"<service-report/>"),
]
STATSD = [b"shop.orders:1|c", b"shop.load:0.5|g\nshop.time:12|ms|@0.1", b"a.b:-3|g|#tag:x"]
REST_BODY = (
    b'{"name": "name", "type": "memory", "agent": "local", "config": {"value": 1}, "text": "resources: []",'
    b' "value": "x", "content": {}, "to": "TRUE", "where": "TRUE", "query": "SELECT 1", "names": ["name"]}'
)
GENERIC = [
    b"{}",
    b'{"name": "x", "names": ["x"], "where": "TRUE", "after": "", "limit": 10, "id": "a"}',
    b"\x81\xa4name\xa1x",
    b"[]",
    b'{"entries": [{"name": "x", "type": "memory", "agent": "local"}]}',
]
