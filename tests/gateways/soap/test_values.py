"""Durations and moments, and which addresses may be called."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors
from muster.gateways.soap import callbacks, xsd_types


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("PT20S", 20),
        ("PT60.000S", 60),
        ("PT600.000000S", 600),
        ("PT1.50S", 1.5),
        ("P1DT2H3M4S", 93784),
        ("P0D", 0),
        ("-PT5S", -5),
        ("P1Y", 365.25 * 86400),
        ("PT1M", 60),
    ],
)
def test_durations(text, seconds):
    assert xsd_types.parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "P", "PT", "PTM", "P1", "20", "PT20", "P1DT", "PT1S2", "PT-1S", "pt1s", "PT1e9S"]
)
def test_what_is_no_duration(text):
    with pytest.raises(errors.InvalidInput, match="not a duration"):
        xsd_types.parse_duration_s(text)


@given(st.integers(0, 10**9))
def test_a_duration_is_read_as_it_was_written(milliseconds):
    assert xsd_types.parse_duration_s(xsd_types.duration(milliseconds / 1000)) == milliseconds / 1000


def test_moments():
    assert xsd_types.format_datetime(0) == "1970-01-01T00:00:00.000Z"
    assert xsd_types.parse_until_s("1970-01-01T00:01:00Z", 20.0) == 40
    assert xsd_types.parse_until_s("1970-01-01T01:00:00+01:00", 0.0) == 0
    assert xsd_types.parse_until_s("PT3S", 20.0) == 3
    for text in ("yesterday", "2020-01-01", "12:00", "2020-13-01T00:00:00Z"):
        with pytest.raises(errors.InvalidInput):
            xsd_types.parse_until_s(text, 0.0)


ALLOWED = ["http://127.0.0.1:9000/events", "https://*.example.org", "http://sink.example.net:8080/a/"]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9000/events",
        "http://127.0.0.1:9000/events/7?x=1",
        "https://a.example.org/",
        "https://a.b.example.org:443",
        "http://SINK.example.net:8080/a/b",
    ],
)
def test_an_address_on_the_list_may_be_called(url):
    assert callbacks.check(url, ALLOWED) == url


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9000/",
        "http://127.0.0.1:9000/eventsX",
        "http://127.0.0.1:9000/events/../admin",
        "http://127.0.0.1:9000/events/%2e%2e/admin",
        "http://127.0.0.1:9000/events/..;/admin",
        "http://127.0.0.1:22/events",
        "https://127.0.0.1:9000/events",
        "https://example.org/",
        "https://evilexample.org/",
        "https://a.example.org.evil.net/",
        "https://a.example.org:8443/",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]:9000/events",
        "http://localhost:9000/events",
    ],
)
def test_any_other_may_not(url):
    with pytest.raises((callbacks.CallbackNotAllowed, errors.InvalidInput)):
        callbacks.check(url, ALLOWED)


@pytest.mark.parametrize(
    "url",
    ["", "file:///etc/passwd", "ftp://a/", "http://", "http://user:x@127.0.0.1:9000/events", "http://a:b/",
     "http://127.0.0.1:9000\\@evil.net/events", "http://127.0.0.1:9000/events\r\nX: y", "http://ä.org/"],
)  # fmt: skip
def test_what_could_not_be_called_is_refused_as_such(url):
    with pytest.raises(errors.InvalidInput, match="not a valid callback address"):
        callbacks.check(url, ["http://127.0.0.1:9000/events", *ALLOWED])


@given(st.text(max_size=60))
def test_no_text_breaks_the_check(url):
    for item in (url, f"http://{url}", f"http://127.0.0.1:9000/events{url}"):
        with contextlib.suppress(errors.InvalidInput, callbacks.CallbackNotAllowed):
            callbacks.check(item, ALLOWED)
