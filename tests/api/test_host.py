"""The Host header of requests over real sockets (RFC 9112, section 3.2)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.harness import running_api, settings_for
from tests.api.test_slow_and_endless import OFFER, peer_of

pytestmark = pytest.mark.anyio
ASKED = b"GET /healthz HTTP/1.1\r\n"
OLD = b"GET /healthz HTTP/1.0\r\n"
REFUSED = {
    "none": ASKED,
    "two": ASKED + b"host: a.example\r\nHost: b.example\r\n",
    "two that are equal": ASKED + b"host: a.example\r\nhost: a.example\r\n",
    "two before HTTP/1.1": OLD + b"host: a.example\r\nhost: b.example\r\n",
    "two with an offer": ASKED + b"host: a.example\r\nhost: b.example\r\n" + OFFER,
    "none with an offer": ASKED + OFFER,
    "empty": ASKED + b"host:\r\n",
    "a list": ASKED + b"host: a.example, b.example\r\n",
    "a URL": ASKED + b"host: http://a.example\r\n",
    "with a path": ASKED + b"host: a.example/x\r\n",
    "with a user": ASKED + b"host: me@a.example\r\n",
    "not ASCII": ASKED + b"host: \xe4.example\r\n",
    "with a bad escape": ASKED + b"host: a%2.example\r\n",
    "with a word as port": ASKED + b"host: a.example:http\r\n",
    "with a port that is too large": ASKED + b"host: a.example:65536\r\n",
    "with an open bracket": ASKED + b"host: [::1\r\n",
    "with no IPv6 address": ASKED + b"host: [1:2:3]\r\n",
    "too long": ASKED + b"host: " + b"a" * 256 + b"\r\n",
}
ACCEPTED = {
    "a name": ASKED + b"host: a.example\r\n",
    "a name with a port": ASKED + b"Host: a.example:65535\r\n",
    "an empty port": ASKED + b"host: a.example:\r\n",
    "an IPv4 address": ASKED + b"host: 127.0.0.1:8080\r\n",
    "an IPv6 address": ASKED + b"host: [::1]:8080\r\n",
    "a name of a service": ASKED + b"host: my_service.default.svc\r\n",
    "an offer": ASKED + b"host: a.example\r\n" + OFFER,
    "none before HTTP/1.1": OLD,
}


@pytest.mark.parametrize("head", REFUSED.values(), ids=REFUSED)
async def test_wrong_hosts_are_refused(tmp_path: Path, head: bytes) -> None:
    async with running_api(settings_for(tmp_path)) as api, peer_of(api) as peer:
        await peer.send(head + b"\r\n")
        status, body = await peer.answer()
    assert status == 400
    error = json.loads(body)["error"]
    assert (error["code"], error["param"]) == ("invalid_input", "host")
    assert error["message"].startswith("host: ")


@pytest.mark.parametrize("head", ACCEPTED.values(), ids=ACCEPTED)
async def test_right_hosts_are_accepted(tmp_path: Path, head: bytes) -> None:
    async with running_api(settings_for(tmp_path)) as api, peer_of(api) as peer:
        await peer.send(head + b"\r\n")
        status, _ = await peer.answer()
    assert status == 200


async def test_second_request_of_a_connection_needs_a_host_too(tmp_path: Path) -> None:
    async with running_api(settings_for(tmp_path)) as api, peer_of(api) as peer:
        await peer.send(ASKED + b"host: a.example\r\n\r\n" + ASKED + b"\r\n")
        assert b'"param":"host"' in await peer.said()
