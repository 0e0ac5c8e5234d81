"""File names in forms, as various clients write them, and source images in JSON."""

import base64
import encodings
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image
from starlette.requests import Request
from starlette.types import Message

from api.http.upload_form import first_field
from infra.local.redis_server import RedisServer
from tests.api.harness import IMAGE_MODEL, ApiUnderTest, running_api, settings_for

pytestmark = pytest.mark.anyio
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/embeddings",
    "body": {"model": "m", "input": "a"},
}
NAMES = {
    b'filename="plain.jsonl"': "plain.jsonl",
    b"filename*=UTF-8''na%C3%AFve%20a.jsonl": "naïve a.jsonl",
    b"filename*=utf-8'en'na%C3%AFve.jsonl": "naïve.jsonl",
    b"filename*=iso-8859-1''na%EFve.jsonl": "naïve.jsonl",
    b"filename*=nonsense''na%C3%AFve.jsonl": "naïve.jsonl",
    b"filename*=utf-7''na%2BAO8-ve.jsonl": "naïve.jsonl",
    b"filename*=utf-7''half%2B2AA-.jsonl": "half?.jsonl",
    b"filename*=plain.jsonl": "plain.jsonl",
    b"filename*=UTF-8''a%22b%5Cc%3B.jsonl": 'a"b\\c;.jsonl',
    b"filename=\"old.jsonl\"; filename*=UTF-8''na%C3%AFve.jsonl": "naïve.jsonl",
    b"filename*=UTF-8''na%C3%AFve.jsonl; filename=\"old.jsonl\"": "naïve.jsonl",
    b"filename=\"=?utf-8?B?bmHDr3ZlLmpzb25s?=\"; filename*=utf-8''na%C3%AFve.jsonl": "naïve.jsonl",
    b'filename="=?utf-8?B?bmHDr3ZlLmpzb25s?="': "naïve.jsonl",
    b'filename="=?utf-8?Q?na=C3=AFve.jsonl?="': "naïve.jsonl",
    b'filename="=?utf-7?Q?half+2AA-.jsonl?="': "half?.jsonl",
    b'filename="=?nonsense?B?bmHDr3Zl?="': "=?nonsense?B?bmHDr3Zl?=",
    'filename="naïve.jsonl"'.encode(): "naïve.jsonl",
    b"filename=\"filename*=UTF-8''x.jsonl\"": "filename*=UTF-8''x.jsonl",
    b"filename=\"a; filename*=UTF-8''x.jsonl\"": "a; filename*=UTF-8''x.jsonl",
}


@pytest.fixture(scope="module")
async def api(
    tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer, anyio_backend: str
) -> AsyncIterator[ApiUnderTest]:
    folder: Path = tmp_path_factory.mktemp("api")
    async with running_api(settings_for(folder, redis_url=redis_server.url)) as running:
        yield running


def form(name: bytes, written: bytes, content: bytes, **fields: str) -> dict[str, object]:
    parts = [
        b'content-disposition: form-data; name="%s"\r\n\r\n%s' % (key.encode(), value.encode())
        for key, value in fields.items()
    ]
    parts.append(
        b'content-disposition: form-data; name="%s"; %s\r\n\r\n%s' % (name, written, content)
    )
    body = b"".join(b"--b0\r\n" + part + b"\r\n" for part in parts) + b"--b0--\r\n"
    return {
        "content": body,
        "headers": {"content-type": "multipart/form-data; boundary=b0"},
    }


def image() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "png")
    return buffer.getvalue()


@pytest.mark.parametrize(("written", "name"), NAMES.items(), ids=str)
async def test_file_of_a_batch_has_the_name_it_was_sent_with(
    api: ApiUnderTest, written: bytes, name: str
) -> None:
    sent = form(b"file", written, json.dumps(LINE).encode(), purpose="batch")
    response = await api.http.post("/v1/files", **sent)  # type: ignore[arg-type]
    assert response.status_code == 200, response.text
    assert response.json()["filename"] == name


@pytest.mark.parametrize("written", NAMES, ids=str)
async def test_file_of_a_prediction_is_a_file_however_it_is_named(
    api: ApiUnderTest, written: bytes
) -> None:
    response = await api.http.post("/v1/files", **form(b"content", written, image()))  # type: ignore[arg-type]
    assert response.status_code == 201, response.text


@pytest.mark.parametrize("written", NAMES, ids=str)
async def test_source_image_is_a_file_however_it_is_named(
    api: ApiUnderTest, written: bytes
) -> None:
    sent = form(b"image", written, image(), prompt="a", size="64x64", model=IMAGE_MODEL.name)
    response = await api.http.post("/v1/images/edits", **sent)  # type: ignore[arg-type]
    assert response.status_code == 200, response.text


async def test_unknown_charsets_are_not_remembered(api: ApiUnderTest) -> None:
    """Python caches every codec name it looks up for the life of the process."""
    for written in (
        b"filename*=never-heard-of-it''a.jsonl",
        b'filename="=?never-heard-of-it?B?YQ==?="',
    ):
        sent = form(b"image", written, image(), prompt="a", size="64x64", model=IMAGE_MODEL.name)
        response = await api.http.post("/v1/images/edits", **sent)  # type: ignore[arg-type]
        assert response.status_code == 200, response.text
    sent = form(b"image", b'filename="a.png"', image(), prompt="a")
    kind = "multipart/form-data; boundary=b0; charset=never-heard-of-it"
    headers = {"content-type": kind, "idempotency-key": "a"}
    response = await api.http.post(
        "/v1/images/edits",
        content=sent["content"],  # type: ignore[arg-type]
        headers=headers,
    )
    assert response.json()["error"]["param"] == "content-type"
    assert not [name for name in vars(encodings)["_cache"] if name.startswith("never")]


async def test_long_headers_of_parts_hold_nobody_up(api: ApiUnderTest) -> None:
    """Meanwhile, everything else would have to wait for the event loop."""
    hostile = b"x" + b'"' + b'\\"' * 2000
    part = b'--b0\r\ncontent-disposition: form-data; name="%d"; a=' + hostile + b"\r\n\r\na\r\n"
    body = b"".join(part % number for number in range(60)) + b"--b0--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b0"}
    began_s = time.process_time()
    response = await api.http.post("/v1/images/edits", content=body, headers=headers)
    assert response.status_code == 400
    assert time.process_time() - began_s < 2


async def test_first_name_is_found_as_it_arrives_in_pieces() -> None:
    """Other parts' names, and text that merely looks like a name, do not count."""
    hostile = b"content-disposition:" * 100 + b" name=" * 300
    begun_s = time.process_time()
    for head, name in (
        (b"--b0\r\n" + hostile, ""),
        (
            b'--b0\r\nContent-Disposition: form-data; filename="; name=a"; name="content"\r\n',
            "content",
        ),
        (b"--b0\r\ncontent-disposition: form-data; name=file\r\n", "file"),
        (b'--b0\r\ncontent-disposition: form-data; name="file', '"file'),
    ):
        body = head.ljust(6000, b".") if name == "" else head
        pieces = [body[at : at + 32] for at in range(0, len(body), 32)]
        messages: list[Message] = [
            {"type": "http.request", "body": piece, "more_body": True} for piece in pieces
        ]
        messages[-1]["more_body"] = False
        waiting = iter(messages)

        async def receive(waiting: Iterator[Message] = waiting) -> Message:
            return next(waiting)

        request = Request({"type": "http", "headers": []}, receive)
        found, replayed = await first_field(request)
        assert found == name
        assert await replayed.body() == body
    assert time.process_time() - begun_s < 2


@pytest.mark.parametrize("url", ["", "/a.png", "file:///a.png"])
async def test_source_image_elsewhere_is_refused_in_words(api: ApiUnderTest, url: str) -> None:
    body = {"prompt": "a", "images": [{"image_url": url}]}
    error = (await api.http.post("/v1/images/edits", json=body)).json()["error"]
    assert error["param"] == "images"
    assert error["message"] == (
        "images[0].image_url: must be a data: URI, an https URL, or the ID or URL of a file "
        "uploaded to this API (POST /v1/files)"
    )


@pytest.mark.parametrize("encode", [base64.b64encode, base64.encodebytes])
@pytest.mark.parametrize("is_padded", [True, False])
async def test_source_image_may_be_wrapped_and_lack_its_padding(
    api: ApiUnderTest, encode: Callable[[bytes], bytes], is_padded: bool
) -> None:
    png = image()
    png += b"\0" * (1 + -len(png) % 3)  # one byte past a multiple of three
    text = encode(png).decode()
    assert text.rstrip().endswith("==")
    if not is_padded:
        text = text.rstrip("=\n")
    body = {
        "prompt": f"{encode.__name__}, {is_padded=}",
        "size": "64x64",
        "images": [{"image_url": f"data:image/png;base64,{text}"}],
    }
    response = await api.http.post("/v1/images/edits", json=body)
    assert response.status_code == 200, response.text
