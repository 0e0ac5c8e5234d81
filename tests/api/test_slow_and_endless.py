"""Callers that send too much or too slowly, over real sockets: they are cut off, and no other
caller is affected.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from api.http.middleware import SMALL_BODY_BYTES
from api.server import HEAD_LIMIT_BYTES, MAX_PIPELINED
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.keys import key_for, keys_url
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
BODY = json.dumps({"model": TEXT_MODEL.name, "input": "a"}).encode()
POST = b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
MUCH = 200 * HEAD_LIMIT_BYTES


class Peer:
    """A connection that can send anything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_until_cut(self, piece: bytes, pause_s: float = 0) -> int:
        """Sends `piece` repeatedly until the other side hangs up; returns the number of bytes
        accepted.
        """
        sent = 0
        try:
            while sent < MUCH:
                await self.send(piece)
                sent += len(piece)
                await asyncio.sleep(pause_s)
                if self.reader.at_eof():
                    break
        except OSError:
            pass
        return sent

    async def said(self) -> bytes:
        """All data that arrives until the other side hangs up."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def answer(self) -> tuple[int, bytes]:
        """The next response's status and body."""
        async with asyncio.timeout(WAIT_LIMIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return int(head.split()[1]), await self.reader.readexactly(length)


@asynccontextmanager
async def peer_of(api: ApiUnderTest) -> AsyncIterator[Peer]:
    host, port = api.url.removeprefix("http://").split(":")
    peer = Peer(*await asyncio.open_connection(host, int(port)))
    try:
        yield peer
    finally:
        peer.writer.transport.abort()


@asynccontextmanager
async def _api(tmp_path: Path, **settings: object) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path, **settings)) as api:
        yield api
        assert (await api.http.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (POST + b"x-endless: ", b"a" * 16384),
        (POST + b"x-end", b"a" * 16384),
        (POST, b"x-one: of many\r\n" * 1000),
        (b"GET /", b"a" * 16384),
        (b"", b"\r\n" * 8192),
        (
            POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n",
            b"x-trailer: of many\r\n" * 800,
        ),
        (POST + b"transfer-encoding: chunked\r\n\r\n1;", b"x=y;" * 4096),
    ],
)
async def test_endless_head_is_cut(tmp_path: Path, begin: bytes, piece: bytes) -> None:
    async with _api(tmp_path) as api, peer_of(api) as peer:
        await peer.send(begin)
        assert await peer.send_until_cut(piece) < MUCH


@pytest.mark.parametrize(
    "head", [POST + b"x-large: " + b"a" * HEAD_LIMIT_BYTES, b"GET /" + b"a" * HEAD_LIMIT_BYTES]
)
async def test_head_that_is_too_large_is_told(tmp_path: Path, head: bytes) -> None:
    async with _api(tmp_path) as api, peer_of(api) as peer:
        await peer.send(head)
        said = await peer.said()
        # Unread bytes may have cost us the response, but never the hang-up.
        assert not said or said.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("path", [b"chat/completions", b"images/edits", b"audio/speech"])
async def test_nothing_that_a_stranger_sends_is_waited_for(tmp_path: Path, path: bytes) -> None:
    """This includes idempotency keys, although only the body shows whether to stream."""
    keys = {"keys_url": keys_url(tmp_path, a="acme")}
    head = b"POST /v1/" + path + b" HTTP/1.1\r\nhost: localhost\r\nidempotency-key: a\r\n"
    kind = b"content-type: multipart/form-data; boundary=b\r\ncontent-length: 9\r\n\r\n"
    async with _api(tmp_path, **keys) as api, peer_of(api) as peer:
        await peer.send(head + kind)
        status, _ = await peer.answer()
        assert status == 401


async def test_large_head_that_comes_at_once_is_told(tmp_path: Path) -> None:
    async with _api(tmp_path) as api, peer_of(api) as peer:
        await peer.send(
            POST + b"x-large: " + b"a" * HEAD_LIMIT_BYTES + b"\r\ncontent-length: 0\r\n\r\n"
        )
        status, body = await peer.answer()
        assert status == 431
        assert json.loads(body)["error"]["code"] == "request_headers_too_large"


async def test_head_within_the_limit_passes_in_any_pieces(tmp_path: Path) -> None:
    request = POST + b"x-large: " + b"a" * (HEAD_LIMIT_BYTES - 1000) + b"\r\n"
    request += b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    async with _api(tmp_path) as api, peer_of(api) as peer:
        for _ in range(3):
            for start in range(0, len(request), 3001):
                await peer.send(request[start : start + 3001])
            assert (await peer.answer())[0] == 200


async def test_body_in_tiny_chunks_is_no_head(tmp_path: Path) -> None:
    text = json.dumps({"model": TEXT_MODEL.name, "input": "a" * 20_000}).encode()
    chunks = b"".join(b"1\r\n" + text[at : at + 1] + b"\r\n" for at in range(len(text)))
    async with _api(tmp_path) as api, peer_of(api) as peer:
        for _ in range(2):
            await peer.send(POST + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
            assert (await peer.answer())[0] == 200


async def test_dribbled_head_is_cut(tmp_path: Path) -> None:
    async with _api(tmp_path, head_timeout_s=0.3) as api, peer_of(api) as peer:
        await peer.send(POST)
        await peer.send(b"x: y\r\n")
        status, body = await peer.answer()
        assert status == 408
        assert json.loads(body)["error"]["code"] == "request_timeout"
        assert not await peer.said()


@pytest.mark.parametrize("begin", [b"", b"\r\n", b"GET"])
async def test_connection_that_never_asks_is_closed(tmp_path: Path, begin: bytes) -> None:
    async with _api(tmp_path, head_timeout_s=0.3) as api, peer_of(api) as peer:
        await peer.send(begin)
        said = await peer.said()
        assert said.startswith(b"HTTP/1.1 408") == (begin == b"GET")


async def test_second_head_has_its_limit_too_and_the_pause_before_it_has_none(
    tmp_path: Path,
) -> None:
    async with (
        _api(tmp_path, head_timeout_s=0.3) as api,
        peer_of(api) as peer,
        peer_of(api) as other,
    ):
        request = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        await peer.send(request)
        assert (await peer.answer())[0] == 200
        # By the time this one is closed, the limit has passed for both.
        assert not await other.said()
        await peer.send(request)
        assert (await peer.answer())[0] == 200
        await peer.send(POST)
        assert (await peer.answer())[0] == 408


async def test_body_that_dribbles_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.http.middleware.BODY_GRACE_S", 0.2)
    async with _api(tmp_path) as api, peer_of(api) as peer:
        await peer.send(POST + b"content-length: 1000000\r\n\r\n")
        dribbling = asyncio.create_task(peer.send_until_cut(b" ", pause_s=0.02))
        status, body = await peer.answer()
        dribbling.cancel()
        await asyncio.wait([dribbling])
        assert status == 408
        assert "bytes/s" in json.loads(body)["error"]["message"]


async def test_body_that_nobody_reads_is_not_read_for_ever(tmp_path: Path) -> None:
    async with _api(tmp_path, head_timeout_s=0.3) as api, peer_of(api) as peer:
        await peer.send(
            POST.replace(b"/v1/embeddings", b"/nowhere") + b"content-length: 1000000000\r\n\r\n"
        )
        assert (await peer.answer())[0] == 404
        assert not await peer.said()


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with _api(tmp_path) as api, peer_of(api) as peer:
        paths = [f"/nowhere/{number}" for number in range(MAX_PIPELINED)]
        await peer.send(
            b"".join(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode() for path in paths)
        )
        for path in paths:
            status, body = await peer.answer()
            assert (status, path.encode() in body) == (404, True)


async def test_too_many_pipelined_requests_are_refused(tmp_path: Path) -> None:
    async with _api(tmp_path) as api, peer_of(api) as peer:
        api.worker.go.clear()
        first = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        await peer.send(
            first + b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n" * (MAX_PIPELINED + 1)
        )
        said = await peer.said()
        api.worker.go.set()
        assert said.startswith(b"HTTP/1.1 400")
        assert b"more than %d pipelined requests are waiting" % MAX_PIPELINED in said
        await api.until_idle()


async def test_full_house_closes_who_asks_for_nothing(tmp_path: Path) -> None:
    async with (
        _api(tmp_path, max_connections=4) as api,
        peer_of(api) as first,
        peer_of(api) as second,
        peer_of(api) as third,
    ):
        assert (await api.http.get("/healthz")).status_code == 200
        # Of the four, `first` has been idle the longest.
        async with peer_of(api):
            assert not await first.said()
            for peer in (second, third):
                await peer.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert (await peer.answer())[0] == 200


async def test_full_house_of_requests_refuses_the_next(tmp_path: Path) -> None:
    async with (
        _api(tmp_path, max_connections=2) as api,
        peer_of(api) as first,
        peer_of(api) as second,
    ):
        api.worker.go.clear()
        for number, peer in enumerate((first, second)):
            body = BODY.replace(b'"a"', f'"text {number}"'.encode())
            await peer.send(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        await api.worker.until_taken(2)
        async with peer_of(api) as third:
            said = await third.said()
            assert said.startswith(b"HTTP/1.1 429")
            assert b"retry-after" in said
        api.worker.go.set()
        for peer in (first, second):
            assert (await peer.answer())[0] == 200


LARGE_BYTES = 24 * 1024 * 1024
"""More response data than the kernel buffers when the caller doesn't read."""


async def _large(api: ApiUnderTest) -> bytes:
    """A request for a file larger than the kernel's buffers; it needs no key."""
    sent = await api.http.post(
        "/v1/files", files={"content": ("a", bytes(LARGE_BYTES))}, timeout=WAIT_LIMIT_S
    )
    path = sent.json()["urls"]["download"].removeprefix(api.url)
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


async def _until_unread(connections: int) -> None:
    """Returns when `count` connections are stuck because their responses are not read."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        unread = "penstock_api_connections_unread"
        while REGISTRY.get_sample_value(unread) != connections:  # noqa: ASYNC110 - the product has no use for an event
            await asyncio.sleep(0.01)


async def test_full_house_closes_who_reads_no_answer(tmp_path: Path) -> None:
    async with _api(tmp_path, max_connections=2) as api:
        request = await _large(api)
        async with peer_of(api) as first, peer_of(api) as second:
            for number, peer in enumerate((first, second), 1):
                await peer.send(2 * request)
                await _until_unread(number)
            async with peer_of(api) as third:
                await third.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                assert (await third.answer())[0] == 200
                assert len(await first.said()) < LARGE_BYTES
                assert [(await second.answer())[0] for _ in range(2)] == [200, 200]


async def test_answers_that_nobody_reads_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.server.UNREAD_MAX_BYTES", LARGE_BYTES)
    async with _api(tmp_path) as api:
        request = await _large(api)
        async with peer_of(api) as first, peer_of(api) as second:
            await first.send(2 * request)
            await _until_unread(1)
            await second.send(request)
            assert (await second.answer())[0] == 200
            assert len(await first.said()) < LARGE_BYTES


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
        POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        POST + b"content-length: 5\r\ncontent-length: 5\r\n\r\n",
        POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        POST + b"transfer-encoding: identity\r\n\r\n",
        POST + b"transfer-encoding: chunked, identity\r\n\r\n",
        POST + b"transfer-encoding : chunked\r\n\r\n",
        POST + b"transfer-encoding:\r\n chunked\r\n\r\n",
        POST + b"x-folded: a\r\n b\r\ncontent-length: 0\r\n\r\n",
        POST + b"x-bare: a\ncontent-length: 0\r\n\r\n",
        b"GET http://[x/ HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /\x80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_refused(tmp_path: Path, request_: bytes) -> None:
    async with _api(tmp_path) as api, peer_of(api) as peer:
        await peer.send(request_)
        status, body = await peer.answer()
        assert status == 400
        assert json.loads(body)["error"]["code"] == "invalid_input"


OFFER = (
    b"connection: Upgrade, HTTP2-Settings\r\n"
    b"upgrade: h2c\r\n"
    b"http2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
)
"""Java's client sends this with each plain-HTTP request."""


@pytest.mark.parametrize(
    "offer", [OFFER, b"connection: upgrade\r\nupgrade: websocket\r\n"], ids=["h2c", "websocket"]
)
@pytest.mark.parametrize("piece_bytes", [1, 7, 100_000])
async def test_offer_of_another_protocol_is_passed_over(
    tmp_path: Path, offer: bytes, piece_bytes: int
) -> None:
    sized = POST + offer + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    chunked = (
        POST
        + offer
        + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    )
    empty = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + offer + b"\r\n"
    sent = sized + empty + chunked + sized
    async with _api(tmp_path) as api, peer_of(api) as peer:
        for start in range(0, len(sent), piece_bytes):
            await peer.send(sent[start : start + piece_bytes])
            await asyncio.sleep(0)
        assert [(await peer.answer())[0] for _ in range(4)] == [200] * 4


@pytest.mark.parametrize(
    "last",
    [
        b"GET /healthz HTTP/1.0\r\nconnection: upgrade",
        b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close, upgrade",
    ],
)
async def test_offer_in_the_last_request_of_a_connection_is_passed_over(
    tmp_path: Path, last: bytes
) -> None:
    async with _api(tmp_path) as api, peer_of(api) as peer:
        await peer.send(last + b"\r\nupgrade: h2c\r\n\r\n")
        assert (await peer.said()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("offer", [b"", OFFER], ids=["plain", "with an offer"])
@pytest.mark.parametrize("target", [b"a:443", b"/healthz"])
async def test_tunnels_are_refused(tmp_path: Path, target: bytes, offer: bytes) -> None:
    async with _api(tmp_path) as api, peer_of(api) as peer:
        await peer.send(
            b"CONNECT " + target + b" HTTP/1.1\r\nhost: localhost\r\n" + offer + b"\r\n"
        )
        said = await peer.said()
        assert said.startswith(b"HTTP/1.1 400")
        assert b"not a proxy" in said


async def test_trailers_are_no_headers(tmp_path: Path) -> None:
    """A proxy looks only at headers: fields that it strips or checks must not arrive after the
    body.
    """
    chunked = POST + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n%x\r\n%b\r\n0\r\n" % (
        len(BODY),
        BODY,
    )
    async with _api(tmp_path) as api, peer_of(api) as peer:
        await peer.send(chunked + b"x-request-id: trailing\r\n\r\n")
        said = await peer.said()
        assert said.startswith(b"HTTP/1.1 200")
        assert b"trailing" not in said


async def test_body_beside_an_offer_is_no_request(tmp_path: Path) -> None:
    """Otherwise, a proxy that forwards the offer would mix up its callers' responses."""
    hidden = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with _api(tmp_path) as api, peer_of(api) as peer:
        await peer.send(POST + OFFER + b"content-length: %d\r\n\r\n" % len(hidden))
        await asyncio.sleep(0)
        await peer.send(
            hidden + b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        said = await peer.said()
        assert said.count(b"HTTP/1.1 ") == 2
        assert said.startswith(b"HTTP/1.1 400")


async def test_many_offers_at_once_are_bounded_as_requests_are(tmp_path: Path) -> None:
    async with _api(tmp_path) as api, peer_of(api) as peer:
        await peer.send(
            (b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n" + OFFER + b"\r\n")
            * (MAX_PIPELINED + 2)
        )
        expected = b"more than %d pipelined requests are waiting" % MAX_PIPELINED
        assert expected in await peer.said()


async def test_bodies_are_bounded_together(tmp_path: Path) -> None:
    length = 2 * SMALL_BODY_BYTES
    head = POST + b"content-length: %d\r\n\r\n" % length
    async with (
        _api(tmp_path, bodies_max_bytes=3 * SMALL_BODY_BYTES) as api,
        peer_of(api) as first,
        peer_of(api) as second,
    ):
        await first.send(head + b" " * (length - 1))
        # The rejections show how much of it has been read.
        statuses = []
        while 429 not in statuses:
            await second.send(head + b" " * length)
            statuses.append((await second.answer())[0])
        assert set(statuses) <= {400, 429}
        small = await api.http.post(
            "/v1/embeddings", content=BODY, headers={"content-type": "application/json"}
        )
        assert small.status_code == 200
        await first.send(b" ")
        assert (await first.answer())[0] == 400
        async with peer_of(api) as third:
            await third.send(head + b" " * length)
            assert (await third.answer())[0] == 400


async def test_bodies_of_one_tenant_leave_room_for_another(tmp_path: Path) -> None:
    """Slow bodies occupy memory for as long as they take to arrive: up to an hour for the
    largest.
    """
    length = 2 * SMALL_BODY_BYTES
    busy, quiet = (
        POST + b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n" % (key, length)
        for key in (key_for("b").encode(), key_for("q").encode())
    )
    async with AsyncExitStack() as stack:
        settings = {
            "bodies_max_bytes": 8 * length,
            "keys_url": keys_url(tmp_path, b="busy", q="quiet"),
        }
        api = await stack.enter_async_context(_api(tmp_path, **settings))
        for _ in range(8):
            await (await stack.enter_async_context(peer_of(api))).send(busy + b" " * (length - 1))
        probe, other = [await stack.enter_async_context(peer_of(api)) for _ in range(2)]
        while True:
            await probe.send(busy + b" " * length)
            if (await probe.answer())[0] == 429:
                break
        await other.send(quiet + b" " * length)
        assert (await other.answer())[0] == 400


async def test_slow_bodies_of_one_tenant_leave_connections_to_another(tmp_path: Path) -> None:
    """The bodies are small, and each occupies a connection for as long as it takes to arrive."""
    busy, quiet = (
        POST + b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n" % (key, len(BODY))
        for key in (key_for("b").encode(), key_for("q").encode())
    )
    async with AsyncExitStack() as stack:
        settings = {"max_connections": 16, "keys_url": keys_url(tmp_path, b="busy", q="quiet")}
        api = await stack.enter_async_context(_api(tmp_path, **settings))
        peers = []
        for _ in range(10):
            peer = await stack.enter_async_context(peer_of(api))
            await peer.send(busy + BODY[:1])
            peers.append(peer)
        answers = [asyncio.create_task(peer.answer()) for peer in peers]
        done, waiting = await asyncio.wait(
            answers, timeout=WAIT_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        assert {task.result()[0] for task in done} == {429}
        assert waiting
        other = await stack.enter_async_context(peer_of(api))
        await other.send(quiet + BODY[:1])
        await other.send(BODY[1:])
        assert (await other.answer())[0] == 200
        for peer, answer in zip(peers, answers, strict=True):
            if not answer.done():
                await peer.send(BODY[1:])
                assert (await answer)[0] in (200, 429)
