"""Sockets of servers: of one process, and a port that several share."""

from __future__ import annotations

import dataclasses

import pytest

from muster.app.supervisor import endpoints
from muster.core import errors

HERE = endpoints.Endpoint("http", "127.0.0.1", 0)


def at(listener, **changes) -> endpoints.Endpoint:
    return dataclasses.replace(HERE, port=listener.getsockname()[1], **changes)


def test_a_port_in_use_is_refused_or_another_one_is_taken():
    with HERE.listen() as first:
        with pytest.raises(errors.Unavailable, match=r"port \d+ of 127\.0\.0\.1 is in use"):
            at(first).listen()
        with at(first, or_any_port=True).listen() as second:
            assert second.getsockname()[1] != first.getsockname()[1]
        assert HERE.url(first) == f"http://127.0.0.1:{first.getsockname()[1]}"


def test_a_port_is_shared_only_on_request():
    with HERE.reserve() as reserved, at(reserved, shared=True).listen(), at(reserved, shared=True).listen():
        with pytest.raises(errors.Unavailable, match="in use"):
            at(reserved).reserve()
        with at(reserved, shared=True).reserve() as other:
            assert other.getsockname()[1] == reserved.getsockname()[1]


def test_an_address_of_another_machine_is_no_place_to_listen():
    with pytest.raises(errors.Unavailable, match=r"port 0 of 192\.0\.2\.1 cannot be used"):
        endpoints.Endpoint("http", "192.0.2.1", 0).listen()


def test_passwords_are_sent_encrypted_or_stay_on_the_machine():
    endpoints.require_encryption("127.0.0.1", "", "amqp.certificate")
    endpoints.require_encryption("0.0.0.0", "gateway.pem", "amqp.certificate")
    with pytest.raises(errors.Refused, match=r"unencrypted on 0\.0\.0\.0"):
        endpoints.require_encryption("0.0.0.0", "", "amqp.certificate")
