"""Inputs specified by https URLs are fetched before a request is accepted, and only from allowed
locations.
"""

from __future__ import annotations

import asyncio
import base64
import encodings
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from aiohttp import web

from api.inputs import url_fetcher
from api.inputs.storage import Storage, StorageQuota
from api.inputs.url_fetcher import MAX_AT_A_TIME, FetchFailed, UrlFetcher
from shared.errors import BadInput, Overloaded, PenstockError, Unavailable
from shared.models.catalog import Catalog, Model
from shared.models.interface import ModelInterface
from shared.models.tasks.custom import CustomInput
from shared.models.tasks.image import ImageInput
from shared.stores.fetched_urls import FetchedUrls
from shared.stores.objects import ObjectStore
from shared.stores.redis_client import NO_REDIS
from shared.web.pinned_http import Resolve, resolve
from tests.api.fake_worker import png_of
from tests.api.file_server import NAME, FileServer, serving_files
from tests.api.harness import (
    CATALOG,
    IMAGE_MODEL,
    TEXT_MODEL,
    ApiUnderTest,
    api_with_redis,
    running_api,
    settings_for,
)
from tests.api.predicting import WAIT, until_over
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores
from tests.waiting import until

pytestmark = pytest.mark.anyio
PNG = png_of(ImageInput("", 64, 64, 1, 1.0, 99, "ddim"))
LARGE = 25_000_000
FILE = {"type": "string", "format": "uri"}
CLASS = Model.model_validate(
    {
        "name": "mine",
        "task": "custom",
        "source": "local:nowhere",
        "interface": ModelInterface(
            inputs={
                "type": "object",
                "properties": {"file": FILE, "files": {"type": "array", "items": FILE}},
            },
            output={"type": "string"},
            cog_version="0",
            sources_sha256="0" * 64,
        ),
    }
)

closed = api_with_redis(secret="s", fetch_hosts="*")


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    async with serving_files(tmp_path) as server:
        yield server


@pytest.fixture
async def api(tmp_path: Path, redis_url: str, files: FileServer) -> AsyncIterator[ApiUnderTest]:
    """An API that may fetch from the file server."""
    catalog = Catalog((*CATALOG.models, CLASS))
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s", **files.settings)
    async with running_api(settings, catalog=catalog) as running:
        yield running


async def edited(api: ApiUnderTest, url: str, **headers: str) -> Any:
    given = {"prompt": "a", "image": url, "seed": 1, "prompt_strength": 0.5}
    body = {"version": IMAGE_MODEL.name, "input": given}
    return await api.http.post("/v1/predictions", json=body, headers=WAIT | headers)


async def refusal(api: ApiUnderTest, url: str) -> str:
    """The reason an image is rejected. Also checks that nothing was created."""
    response = await edited(api, url)
    assert response.status_code == 422, response.text
    (wrong,) = response.json()["invalid_fields"]
    assert wrong["field"] == "input.image"
    assert not api.worker.jobs
    return str(wrong["description"])


async def given_to_class(api: ApiUnderTest, **given: Any) -> CustomInput:
    """The input that the worker receives for a prediction with the class."""
    api.worker.is_silent = True
    body = {"version": "mine", "input": given}
    response = await api.http.post("/v1/predictions", json=body)
    assert response.status_code == 201, response.text
    assert response.json()["input"] == given
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not api.worker.items:  # noqa: ASYNC110  the fake worker has no event for each job
            await asyncio.sleep(0.01)
    found = api.worker.items[-1].input
    assert isinstance(found, CustomInput)
    return found


async def test_an_image_is_fetched_for_an_edit(api: ApiUnderTest, files: FileServer) -> None:
    url = files.add("/cat.png", PNG)
    uri = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    found = (await edited(api, url)).json()
    assert (found["status"], found["input"]["image"]) == ("succeeded", url)
    await edited(api, uri)
    by_url, by_data = (item.input for item in api.worker.items)
    assert isinstance(by_url, ImageInput)
    assert isinstance(by_data, ImageInput)
    assert by_url.image == by_data.image
    asked = files.headers["/cat.png"]
    assert asked["user-agent"] == "Penstock-Fetch/1"
    assert "authorization" not in asked
    assert "cookie" not in asked


async def test_lists_use_the_creation_time_that_they_show(
    api: ApiUnderTest, files: FileServer
) -> None:
    """A prediction is recorded once its image has been fetched, and shows when it was requested."""
    url = files.add("/slow.png", PNG)
    files.held.add("/slow.png")
    async with asyncio.TaskGroup() as group:
        slow = group.create_task(edited(api, url))
        await files.is_asked.wait()
        text = {"version": TEXT_MODEL.name, "input": {"text": "a"}}
        later = (await api.http.post("/v1/predictions", json=text, headers=WAIT)).json()
        files.go.set()
    earlier = slow.result().json()
    between = later["created_at"]
    assert earlier["created_at"] < between
    for query, expected in (
        ({}, [later, earlier]),
        ({"created_before": between}, [earlier]),
        ({"created_after": between}, [later]),
    ):
        page = (await api.http.get("/v1/predictions", params=query)).json()
        assert [entry["id"] for entry in page["results"]] == [entry["id"] for entry in expected]


async def test_an_image_is_fetched_for_openais_edits(api: ApiUnderTest, files: FileServer) -> None:
    url = files.add("/cat.png", PNG)
    body = {"prompt": "a", "size": "64x64", "images": [{"image_url": url}], "model": "mine"}
    body["model"] = IMAGE_MODEL.name
    assert (await api.http.post("/v1/images/edits", json=body)).status_code == 200
    body["images"] = [{"image_url": f"{files.url}/none"}]
    error = (await api.http.post("/v1/images/edits", json=body)).json()["error"]
    assert (error["param"], error["code"]) == ("images", "invalid_input")
    assert error["message"] == "images[0].image_url: 127.0.0.1 returned 404; expected 200"


async def test_files_of_a_class_are_fetched_at_the_same_time_each_once(
    api: ApiUnderTest, files: FileServer
) -> None:
    text = files.add("/notes", b"hello", "text/plain")
    named = files.add("/x", b"a,b", "text/csv", content_disposition='attachment; filename="a.csv"')
    found = await given_to_class(api, file=named, files=[text, named, text])
    assert [place.at for place in found.places] == [
        ["file"],
        ["files", 0],
        ["files", 1],
        ["files", 2],
    ]
    assert [place.name for place in found.places] == ["a.csv", "notes.txt", "a.csv", "notes.txt"]
    assert [file.data for file in found.files] == [b"a,b", b"hello", b"a,b", b"hello"]
    assert found.files[1].media_type == "text/plain"
    assert files.asked == {"/notes": 1, "/x": 1}


async def test_a_name_that_can_not_be_read_is_that_of_the_path_or_readable(
    api: ApiUnderTest, files: FileServer
) -> None:
    names = {
        # The parser of Python 3.13 reads this one.
        "filename*=b; filename*0=a.txt": "a.txt",
        "filename*=undefined''b.txt": "a.txt",
        "filename*=idna''xn--%00": "a.txt",
        "filename*=unicode_escape''b%5Cud800.txt": "a.txt",
        "filename*=never-heard-of-it''b.txt": "a.txt",
        "filename*0*=never-heard-; filename*1*=of-it''b.txt": "a.txt",
        "filename*=iso-8859-1''na%EFve.txt": "naïve.txt",
        "filename*=utf-7''b%2B2AA-.txt": "b?.txt",
    }
    for number, (given, name) in enumerate(names.items()):
        path = f"/{number}/a.txt"
        url = files.add(path, b"a", "text/plain", content_disposition=f"attachment; {given}")
        found = await given_to_class(api, file=url)
        assert [place.name for place in found.places] == [name], given
    assert not [name for name in vars(encodings)["_cache"] if name.startswith("never")]


@pytest.mark.parametrize(
    "kind", ["text", "t" * 65 + "/plain", "text/plain\r\nx: y", "テキスト/plain"]
)
async def test_a_media_type_that_is_none_goes_no_further(api: ApiUnderTest, kind: str) -> None:
    """It would end up in a header in the object store and in the message."""
    api.worker.is_silent = True
    uri = f"data:{kind};base64,{base64.b64encode(b'a').decode()}"
    body = {"version": "mine", "input": {"file": uri}}
    response = await api.http.post("/v1/predictions", json=body)
    assert response.status_code == 201, response.text
    await until(lambda: bool(api.worker.items))
    one = api.worker.items[-1].input
    assert isinstance(one, CustomInput)
    assert [file.media_type for file in one.files] == ["application/octet-stream"]


async def test_a_name_server_that_is_silent_holds_up_no_other_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It doesn't hold up anything else that needs the event loop's threads either."""
    look_up, released = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, *rest: Any, **more: Any) -> Any:
        if host.endswith(".silent.example"):
            released.wait(WAIT_LIMIT_S)
        return look_up("127.0.0.1", *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    silent = [asyncio.create_task(resolve(f"{number}.silent.example", 443)) for number in range(32)]
    try:
        async with asyncio.timeout(WAIT_LIMIT_S / 2):
            assert await resolve("quick.example", 443) == ["127.0.0.1"]
            assert await asyncio.to_thread(lambda: True)
    finally:
        released.set()
    assert await asyncio.gather(*silent) == [["127.0.0.1"]] * len(silent)


async def test_a_large_file_goes_to_the_object_store(
    api: ApiUnderTest, files: FileServer, tmp_path: Path
) -> None:
    """Files are stored by digest, like uploads and data: URIs, so equal files share one key."""
    data = PNG + bytes(LARGE)
    url = files.add("/large.png", data)
    blob = (await given_to_class(api, file=url)).files[0]
    assert blob.object_key is not None
    stored = await ObjectStore(f"file://{tmp_path}/objects").get(blob.object_key, 2 * LARGE)
    assert stored == data
    assert not list((tmp_path / "objects/inputs/passing").iterdir())
    api.worker.is_silent = False
    prediction = await until_over(api, (await edited(api, url)).json())
    assert prediction["status"] == "succeeded"


async def test_a_repeated_request_loads_nothing_twice(api: ApiUnderTest, files: FileServer) -> None:
    bodies = []

    def tagged() -> web.Response:
        bodies.append(1)
        return web.Response(body=PNG + bytes(LARGE // 100), headers={"etag": '"v1"'})

    files.files["/tagged"] = tagged
    files.redirect("/there", "/tagged")
    url = f"{files.url}/there"
    first = await given_to_class(api, file=url)
    second = await given_to_class(api, file=url)
    assert first.files == second.files
    assert files.headers["/tagged"]["if-none-match"] == '"v1"'
    assert "if-none-match" not in files.headers["/there"]
    files.files["/tagged"] = lambda: web.Response(body=PNG, headers={"etag": '"v2"'})
    assert (await given_to_class(api, file=url)).files != first.files


FORBIDDEN = [
    ("http://receiver.example/a.png", "must be an https URL"),
    ("https://user:secret@receiver.example/", "must not contain credentials"),
    ("https://receiver.example:8443/", "not an allowed host and port"),
    ("https://receiver.example:0/", "must be an https URL"),
    ("https://127.0.0.1/", "not public"),
    ("https://127.1/", "not public"),
    ("https://2130706433/", "not public"),
    ("https://0x7f.1/", "not public"),
    ("https://017700000001/", "not public"),
    ("https://10.0.0.1/", "not public"),
    ("https://169.254.169.254/computeMetadata/v1/", "not public"),
    ("https://metadata.google.internal/", "never public"),
    ("https://[::1]/", "not public"),
    ("https://[::ffff:10.0.0.1]/", "not public"),
    ("https://[fe80::1%25eth0]/", "not public"),
    ("https://[64:ff9b::7f00:1]/", "not public"),
    ("https://[fec0::1]/", "not public"),
    ("https://localhost/", "not public"),
    ("https://receiver/", "has no domain"),
    ("https://1.2.3.400/", "neither a host name nor an IPv4 address"),
    ("https://receiver.example/" + "a" * 2048, "must be at most 2048 characters"),
    ("file:///etc/passwd", "must be a data: URI, an https URL"),
    ("cat.png", "must be a data: URI, an https URL"),
]


async def test_private_places_are_refused_by_field_and_reason(closed: ApiUnderTest) -> None:
    for url, reason in FORBIDDEN:
        assert reason in await refusal(closed, url), url


async def test_nobody_is_connected_to_who_was_not_checked(
    closed: ApiUnderTest, files: FileServer
) -> None:
    """The port would be rejected before the address, so the settings allow the server's port."""
    url = files.add("/a.png", PNG)
    assert "not public" in await refusal(closed, url)
    assert not files.asked


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("https://127.0.0.2/", "127.0.0.2 is 127.0.0.2, which is not public"),
        ("https://169.254.169.254/", "not public"),
        ("https://[::ffff:127.0.0.2]/", "not public"),
        ("http://127.0.0.1/", "must be an https URL"),
        ("https://a:b@127.0.0.1/", "credentials"),
        ("https://127.0.0.1:1/", "not an allowed host and port"),
        ("https://other.example/", "not an allowed host and port"),
        ("https://[", "an invalid URL"),
        ("", "exceeds the maximum of 5 redirects"),
        ("/again", "exceeds the maximum of 5 redirects"),
    ],
)
async def test_redirects_are_judged_as_urls_are(
    api: ApiUnderTest, files: FileServer, location: str, reason: str
) -> None:
    url = files.redirect("/again", location)
    assert reason in await refusal(api, url)
    assert files.asked["/again"] <= 6


async def test_what_is_no_such_file_is_refused(api: ApiUnderTest, files: FileServer) -> None:
    files.files["/broken"] = lambda: web.Response(status=503)
    packed = files.add("/packed", b"x", content_encoding="br")
    long = files.add("/long", b"")
    files.files["/long"] = lambda: web.Response(
        headers={"content-type": "image/png", "content-length": str(url_fetcher.MAX_BYTES + 1)}
    )
    for url, reason in (
        (f"{files.url}/none", "127.0.0.1 returned 404; expected 200"),
        (f"{files.url}/broken", "127.0.0.1 returned 503"),
        (files.add("/page", b"<html>", "text/html"), "its content-type is text/html; expected one"),
        (packed, "its content-encoding must not be set, got br"),
        (long, "exceeds the maximum of 67108864 bytes"),
        (f"{files.url}/endless", "exceeds the maximum of 67108864 bytes"),
        (f"https://127.0.0.1:{files.port}", "127.0.0.1 returned 404"),
    ):
        assert reason in await refusal(api, url), url


async def test_a_slow_body_is_cut(tmp_path: Path, redis_url: str, files: FileServer) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url, fetch_limit_s=0.5, **files.settings)
    async with running_api(settings) as api:
        async with asyncio.timeout(WAIT_LIMIT_S):  # the body never ends
            assert "did not finish within 0.5 s" in await refusal(api, f"{files.url}/slow")


async def test_file_that_was_fetched_under_other_rules_is_checked_again(
    api: ApiUnderTest, files: FileServer
) -> None:
    """A class accepts any media type, but an edit does not."""
    page = files.add("/page", bytes(200_000), "text/html", etag='"1"')
    await given_to_class(api, file=page)
    api.worker.jobs.clear()
    assert "its content-type is text/html" in await refusal(api, page)


async def test_an_operator_may_turn_it_off(tmp_path: Path, redis_url: str) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url, fetch_hosts="")
    async with running_api(settings) as api:
        assert "does not fetch other URLs" in await refusal(api, "https://files.example/a")


@pytest.mark.parametrize("hosts", ["https://a.example", "a.example:x", "a b", "*.*"])
def test_hosts_that_are_none_are_refused_at_the_start(tmp_path: Path, hosts: str) -> None:
    with pytest.raises(Exception, match="must be HOST or HOST:PORT"):
        settings_for(tmp_path, fetch_hosts=hosts)


@pytest.fixture
async def stores(redis_url: str) -> AsyncIterator[RecordStores]:
    async with RecordStores(redis_url) as opened:
        yield opened


async def here(host: str, port: int) -> Sequence[str]:
    """Resolves all names to this machine."""
    return ["127.0.0.1"]


def fetcher(
    tmp_path: Path, given: dict[str, str], known: FetchedUrls, resolve: Resolve
) -> UrlFetcher:
    settings = settings_for(tmp_path, redis_url=NO_REDIS, **given)
    storage = Storage(ObjectStore(f"file://{tmp_path}/objects"))
    return UrlFetcher(settings, storage, known, resolve)


async def fetch(
    of: UrlFetcher, url: str, tenant: str = "t", limit_s: float = WAIT_LIMIT_S
) -> bytes:
    until_s = time.time() + limit_s
    quota = StorageQuota(tenant, 2 * LARGE, "f")
    found = await of.fetch(url, quota=quota, field="f", until_s=until_s, keep_until_s=until_s)
    return found.blob.data or b""


async def test_the_address_that_was_checked_is_the_one_that_is_connected_to(
    tmp_path: Path, files: FileServer, stores: RecordStores
) -> None:
    """A name server that would answer differently next time is queried only once per hop."""
    answers = iter([["127.0.0.1"], ["127.0.0.1"], ["127.0.0.2"]])
    asked = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        return next(answers)

    files.add("/a", b"a", "text/plain")
    url = f"https://{NAME}:{files.port}"
    files.redirect("/there", f"{url}/a")
    one = fetcher(tmp_path, files.settings, stores.fetched_urls, resolve)
    assert await fetch(one, f"{url}/there") == b"a"
    assert asked == [(NAME, files.port)] * 2
    with pytest.raises(BadInput, match=f"f: {NAME} resolves to an address that is not public"):
        await fetch(one, f"{url}/a")
    assert files.asked["/a"] == 1


async def test_one_private_address_among_others_refuses_the_name(
    tmp_path: Path, files: FileServer, stores: RecordStores
) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1", "10.0.0.1"]

    one = fetcher(tmp_path, files.settings, stores.fetched_urls, resolve)
    with pytest.raises(BadInput, match="not public"):
        await fetch(one, f"https://{NAME}:{files.port}/a")
    assert not files.asked


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"SECRET is not HTTP\r\n\r\n", "127.0.0.1: the response is not valid HTTP"),
        (b"HTTP/1.1 302 Found\r\nlocation: https://[SECRET\r\n\r\n", "an invalid URL"),
        (
            b"HTTP/1.1 200 OK\r\ncontent-encoding: SECRET\xff\r\n\r\n",
            "must not be set, got unknown",
        ),
        (
            b"HTTP/1.1 200 OK\r\nbad header SECRET\r\n\r\n",
            "127.0.0.1: the response is not valid HTTP",
        ),
        (b"", "127.0.0.1: the server closed the connection"),
    ],
)
async def test_errors_have_nothing_that_a_host_sent(
    tmp_path: Path, files: FileServer, stores: RecordStores, said: bytes, reason: str
) -> None:
    """The host may be an internal service that was reached by mistake."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files.certificate.cert, files.certificate.key)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
        port = server.sockets[0].getsockname()[1]
        given = files.settings | {"fetch_hosts": f"127.0.0.1:{port}"}
        one = fetcher(tmp_path, given, stores.fetched_urls, here)
        with pytest.raises(PenstockError) as caught:
            await fetch(one, f"https://127.0.0.1:{port}/a")
    assert reason in caught.value.public_message
    assert "SECRET" not in caught.value.public_message


async def test_a_certificate_must_be_of_the_name(
    tmp_path: Path, files: FileServer, stores: RecordStores
) -> None:
    url = f"https://{NAME}:{files.port}"
    files.add("/a", b"a", "text/plain")
    (tmp_path / "other").mkdir()
    async with serving_files(tmp_path / "other") as other:
        given = files.settings | {"fetch_ca": other.settings["fetch_ca"]}
        one = fetcher(tmp_path, given, stores.fetched_urls, here)
        with pytest.raises(FetchFailed, match="certificate"):
            await fetch(one, f"{url}/a")
    assert not files.asked


async def test_a_tenant_leaves_room_for_others(
    tmp_path: Path, files: FileServer, stores: RecordStores
) -> None:
    one = fetcher(tmp_path, files.settings, stores.fetched_urls, here)
    small = files.add("/small", b"a", "text/plain")
    async with AsyncExitStack() as opened:
        group = await opened.enter_async_context(asyncio.TaskGroup())
        urls = [f"{files.url}/slow?{number}" for number in range(MAX_AT_A_TIME)]
        slow = [group.create_task(fetch(one, url)) for url in urls]
        async with asyncio.timeout(WAIT_LIMIT_S):
            while files.asked["/slow"] < MAX_AT_A_TIME // 2:
                files.is_asked.clear()
                await files.is_asked.wait()
        assert await fetch(one, small, "other") == b"a"
        with pytest.raises(Overloaded, match="f: too many files"):
            await fetch(one, small, limit_s=0.1)
        assert files.asked["/slow"] == MAX_AT_A_TIME // 2
        files.go.set()
    assert [task.result() for task in slow] == [b"a"] * MAX_AT_A_TIME


async def asked_for_slow(files: FileServer) -> None:
    """Waits until a slow response body has started."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not files.asked["/slow"]:
            files.is_asked.clear()
            await files.is_asked.wait()


async def test_requests_at_the_same_time_share_a_download(
    tmp_path: Path, files: FileServer, stores: RecordStores
) -> None:
    """They are all from one tenant, and any number is allowed: waiting requests hold no permit."""
    one = fetcher(tmp_path, files.settings, stores.fetched_urls, here)
    slow, small = f"{files.url}/slow", files.add("/small", b"a")
    async with asyncio.TaskGroup() as group:
        ours = [group.create_task(fetch(one, slow)) for _ in range(3 * MAX_AT_A_TIME)]
        theirs = group.create_task(fetch(one, slow, "other"))
        await asked_for_slow(files)
        assert await fetch(one, small) == b"a"
        files.go.set()
    assert [task.result() for task in [*ours, theirs]] == [b"a"] * (len(ours) + 1)
    assert files.asked["/slow"] == 2, "one for each tenant"
    assert await fetch(one, slow) == b"a"
    assert files.asked["/slow"] == 3, "what is over is not shared"


async def test_what_a_server_does_wrong_is_told_to_all_who_share(
    tmp_path: Path, files: FileServer, stores: RecordStores
) -> None:
    one = fetcher(tmp_path, files.settings, stores.fetched_urls, here)
    url = files.redirect("/there", "https://127.0.0.2/")
    tasks = (fetch(one, url) for _ in range(5))
    failed = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, BadInput) for error in failed)
    assert all("127.0.0.2" in str(error) for error in failed)
    assert files.asked["/there"] == 1


@pytest.mark.parametrize("is_canceled", [True, False])
async def test_who_shares_goes_on_if_the_other_ends_first(
    tmp_path: Path, files: FileServer, stores: RecordStores, is_canceled: bool
) -> None:
    one = fetcher(tmp_path, files.settings, stores.fetched_urls, here)
    slow = f"{files.url}/slow"
    first = asyncio.create_task(fetch(one, slow, limit_s=WAIT_LIMIT_S if is_canceled else 0.5))
    await asked_for_slow(files)
    second = asyncio.create_task(fetch(one, slow))
    impatient = asyncio.create_task(fetch(one, slow, limit_s=0.1))
    with pytest.raises(FetchFailed, match="f: the download did not finish within"):
        await impatient
    if is_canceled:
        first.cancel()
    with pytest.raises(asyncio.CancelledError if is_canceled else FetchFailed):
        await first
    async with asyncio.timeout(WAIT_LIMIT_S):
        while files.asked["/slow"] < 2:
            files.is_asked.clear()
            await files.is_asked.wait()
    files.go.set()
    assert await second == b"a"
    assert files.asked["/slow"] == 2


async def test_what_is_remembered_of_a_file_may_be_damaged(
    tmp_path: Path, files: FileServer, stores: RecordStores, redis_url: str
) -> None:
    loader = fetcher(tmp_path, files.settings, stores.fetched_urls, here)
    url = files.add("/a", bytes(200_000), "text/plain", etag='"v"')
    await fetch(loader, url)
    with redis.Redis.from_url(redis_url) as client:
        (known,) = client.keys("penstock:fetched:*")
        client.set(known, b'{"final_url": "\xff"}')
    await fetch(loader, url)
    assert files.asked["/a"] == 2


async def test_object_store_that_is_down_is_not_the_servers_fault(
    tmp_path: Path, files: FileServer, stores: RecordStores
) -> None:
    loader = fetcher(tmp_path, files.settings, stores.fetched_urls, here)
    (tmp_path / "objects/inputs").write_bytes(b"")
    with pytest.raises(Unavailable):
        await fetch(loader, files.add("/large", bytes(200_000), "text/plain"))


async def test_without_redis_it_is_fetched_all_the_same(tmp_path: Path, files: FileServer) -> None:
    url = files.add("/a", b"a", "text/plain", etag='"v"')
    async with RecordStores(NO_REDIS) as unreachable:
        assert (
            await fetch(fetcher(tmp_path, files.settings, unreachable.fetched_urls, here), url)
            == b"a"
        )
