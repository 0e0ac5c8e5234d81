"""Webhooks go only to addresses that were checked, over https, and never to private ones."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from shared.errors import Unavailable
from shared.web.pinned_http import Resolve
from shared.web.public_url import is_public
from shared.webhooks.event import WebhookUrlForbidden
from tests.limits import WAIT_LIMIT_S
from tests.workers.functions.receiver import Receiver
from tests.workers.functions.tokens import Issuer
from tests.workers.functions.world import World
from workers.functions import webhook as destination
from workers.functions.webhook import WebhookClient, WebhookResponse

pytestmark = pytest.mark.anyio


def gives(*addresses: str) -> Resolve:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    return resolve


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946"]
)
def test_public_addresses(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "224.0.0.1",
        "239.1.1.1",
        "255.255.255.255",
        "0.0.0.0",
        "198.18.0.1",
        "::",
        "::1",
        "fe80::1",
        "fc00::1",
        "fd20:ce::254",
        "ff02::1",
        "::ffff:10.1.2.3",
        "::ffff:169.254.169.254",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001:db8::1",
    ],
)
async def test_private_addresses_are_refused(address: str) -> None:
    assert not is_public(ip_address(address))
    with pytest.raises(WebhookUrlForbidden, match="not public"):
        await WebhookClient(
            "https://receiver.example/hook", resolve=gives("93.184.216.34", address)
        ).post({}, b"")


@pytest.mark.parametrize(
    "url",
    [
        "http://receiver.example/",
        "ftp://receiver.example/",
        "file:///etc/passwd",
        "https://",
        "https:///hook",
        "receiver.example",
        "https://receiver.example:99999/",
        "",
    ],
)
async def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(WebhookUrlForbidden):
        await WebhookClient(url, resolve=gives("93.184.216.34")).post({}, b"")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "017700000001",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "localhost",
    ],
)
async def test_no_spelling_of_this_machine_gets_through(host: str) -> None:
    """Uses the real resolver, while a server is listening on the port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        with pytest.raises((WebhookUrlForbidden, Unavailable)):
            await WebhookClient(f"https://{host}:{listening.getsockname()[1]}/").post({}, b"")
        with pytest.raises(BlockingIOError):
            listening.accept()


async def test_connects_to_what_was_judged_under_the_own_name(receiver: Receiver) -> None:
    asked = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return ["127.0.0.1"]

    url = f"http://receiver.example:{receiver.port}/hook"
    answer = await WebhookClient(url, allow_private=True, resolve=resolve).post(
        {"x-a": "1"}, b"body"
    )
    (delivery,) = receiver.deliveries
    assert answer == WebhookResponse(204, "")
    assert asked == [("receiver.example", receiver.port)]
    assert (delivery.headers["host"], delivery.headers["x-a"]) == (
        f"receiver.example:{receiver.port}",
        "1",
    )
    assert delivery.body == b"body"


async def test_tls_is_by_name_and_certificates_are_checked(issuer: Issuer, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text(issuer.key)
    (tmp_path / "certificate.pem").write_text(issuer.certificate)
    tls, asked = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), list[str]()
    tls.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    tls.sni_callback = lambda connection, name, context: asked.append(name)
    listening = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, ssl=tls)
    async with listening:
        url = f"https://receiver.example:{listening.sockets[0].getsockname()[1]}/hook"
        with pytest.raises(Unavailable, match="certificate"):
            await WebhookClient(url, allow_private=True, resolve=gives("127.0.0.1")).post({}, b"")
    assert asked == ["receiver.example"]


async def test_an_address_that_was_not_checked_is_not_reached(receiver: Receiver) -> None:
    """A URL with an IP address skips the resolver, and approving a different address does not
    help.
    """
    with pytest.raises(Unavailable, match="not one of the verified addresses"):
        await WebhookClient(receiver.url, allow_private=True, resolve=gives("127.0.0.2")).post(
            {}, b""
        )
    assert receiver.deliveries == []


async def test_redirects_are_answers(receiver: Receiver) -> None:
    receiver.statuses = [307]
    answer = await WebhookClient(receiver.url, allow_private=True).post({}, b"")
    assert (answer.status, len(receiver.deliveries)) == (307, 1)


async def test_only_the_first_words_of_an_answer_are_read() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        try:
            while True:
                await response.write(b"no " * 20_000)
        except ConnectionError:
            return response

    app = web.Application()
    app.router.add_post("/", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        answer = await WebhookClient(url, allow_private=True).post({}, b"")
        assert (answer.status, len(answer.words)) == (500, destination.READ_BYTES)
    finally:
        await runner.cleanup()


async def test_silence_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destination, "TOTAL_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        async with asyncio.timeout(WAIT_LIMIT_S):
            with pytest.raises(Unavailable):
                await WebhookClient(url, allow_private=True).post({}, b"")


@pytest.mark.parametrize(
    "error", [socket.gaierror("no such name"), TimeoutError(), UnicodeError("label too long")]
)
async def test_name_that_has_no_address_is_tried_again(error: Exception) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise error

    with pytest.raises(Unavailable):
        await WebhookClient("https://receiver.example/", resolve=resolve).post({}, b"")


async def test_function_does_not_go_to_this_machine(
    world: World, receiver: Receiver, issuer: Issuer, guarded_url: str
) -> None:
    """Calls go through the endpoint, without the setting that allows private addresses.

    The push is unwrapped, but that makes no difference.
    """
    await world.create(f"https://127.0.0.1:{receiver.port}/hook")
    event = json.dumps({"id": world.request_id, "event": "start"})
    async with httpx.AsyncClient(base_url=guarded_url) as client:
        answer = await client.post(
            "/webhook", content=event, headers={"authorization": f"Bearer {issuer.token()}"}
        )
        metrics = (await client.get("/metrics")).text
    assert answer.status_code == 204
    assert 'penstock_functions_webhooks_total{end="forbidden",event="start"} 1.0' in metrics
    assert receiver.deliveries == []
