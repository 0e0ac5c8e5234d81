"""Inputs, files, paths and headers of any kind get a response, and a 5xx only if something is
unreachable or overdue.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.api.harness import IMAGE_MODEL, TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.keys import key_for, keys_url
from tests.limits import WAIT_LIMIT_S
from tests.tiers import examples

pytestmark = pytest.mark.anyio
ANY_NUMBER_OF_EXAMPLES = settings(
    max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck)
)
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
async def api(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Any
) -> AsyncIterator[ApiUnderTest]:
    folder = tmp_path_factory.mktemp("api")
    settings = settings_for(
        folder, redis_url=redis_server.url, secret="s", keys_url=keys_url(folder, a="acme")
    )
    async with running_api(settings) as running:
        running.http.headers["x-api-key"] = key_for("a")
        yield running


async def _answered(api: ApiUnderTest, request: bytes) -> tuple[int, bytes]:
    """The response to a request sent as is, bypassing any client that would repair it."""
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        async with asyncio.timeout(WAIT_LIMIT_S):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    assert head, "it hung up without a word"
    return int(head.split(b" ", 2)[1]), body


def _request(
    method: str, path: str, body: bytes = b"", host: bytes = b"", headers: bytes = b""
) -> bytes:
    length = b"content-length: %d\r\n" % len(body)
    # With a key, any host is accepted, and malformed requests get further than they do without one.
    known = b"\r\nx-api-key: " + key_for("a").encode() + b"\r\nconnection: close\r\n"
    lines = b"host: " + (host or b"a") + known + length + headers
    return f"{method} {path} HTTP/1.1\r\n".encode("latin-1") + lines + b"\r\n" + body


def _check(status: int, body: bytes) -> None:
    assert 200 <= status < 500, (status, body[:500])


# JSON values, including unpaired surrogates and numbers that exceed every limit.
odd_texts = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [
            "\ud800",
            "a\udfffb",
            "\x00",
            "\u2028",
            "\U0001f600",
            "%",
            "%zz",
            "%00",
            "../..",
            "//",
            "[",
            "]",
        ]
    ),
)
odd_numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([10**400, -(10**30), 2**63, 2**64, 1e308])
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), odd_numbers, odd_texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(odd_texts, inner, max_size=4)
    ),
    max_leaves=12,
)
PIECES = [
    "/v1/files/",
    "/objects/",
    "/",
    "//[x",
    "]",
    "@",
    ":",
    "?",
    "#",
    "expires=",
    "9" * 5000,
    "&type=",
    "image/png",
]
PIECES += ["&signature=", "é", "%", "file_" + "0" * 24, "results/00/a.png", "\\", " ", "\t", "\n"]
places = st.lists(st.one_of(odd_texts, st.sampled_from(PIECES)), max_size=8).map("".join)
data_uris = st.builds(
    "data:{};base64,{}".format,
    odd_texts,
    st.one_of(odd_texts, st.just(base64.b64encode(PNG).decode())),
)


def _dumped(value: object) -> bytes:
    return json.dumps(value).encode()


@ANY_NUMBER_OF_EXAMPLES
@given(
    image=st.one_of(
        places.map("http://a/{}".format), places.map("http://a{}".format), places, data_uris, values
    ),
    others=st.dictionaries(
        st.sampled_from(
            [
                "prompt",
                "seed",
                "size",
                "strength",
                "guidance_scale",
                "width",
                "output_format",
                "scheduler",
            ]
        ),
        values,
        max_size=3,
    ),
)
@example(image="http://a//[x", others={})
async def test_images_of_predictions(
    api: ApiUnderTest, image: object, others: dict[str, Any]
) -> None:
    body = _dumped({"input": {"prompt": "a", **others, "image": image}})
    path = f"/v1/models/o/{IMAGE_MODEL.name}/predictions"
    _check(*await _answered(api, _request("POST", path, body)))


@ANY_NUMBER_OF_EXAMPLES
@given(
    body=st.one_of(
        values, st.fixed_dictionaries({"version": st.just(TEXT_MODEL.name), "input": values})
    )
)
async def test_bodies_of_predictions(api: ApiUnderTest, body: object) -> None:
    _check(*await _answered(api, _request("POST", "/v1/predictions", _dumped(body))))


async def test_number_without_end(api: ApiUnderTest) -> None:
    for field in ("seed", "guidance_scale", "image", "other"):
        body = b'{"input": {"prompt": "a", "%s": %s}}' % (field.encode(), b"9" * 5000)
        _check(
            *await _answered(
                api, _request("POST", f"/v1/models/o/{IMAGE_MODEL.name}/predictions", body)
            )
        )


DEPTHS = (50, 190, 250, 900, 990, 1100, 9000, 100_000)
"""Python 3.11 decodes less than 1,000 levels, and later versions almost 10,000."""
DEEPEST = 200


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "path", ["/v1/predictions", "/v1/embeddings", "/v1/images/generations", "/v1/images/edits"]
)
async def test_nested_bodies(api: ApiUnderTest, path: str, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    body = (
        f'{{"model": "{TEXT_MODEL.name}", "version": "{TEXT_MODEL.name}",'
        f' "prompt": "a", "input": {nested}}}'
    )
    headers = b"content-type: application/json\r\n"
    status, answer = await _answered(api, _request("POST", path, body.encode(), headers=headers))
    assert status in (400, 422), answer
    assert (b"nested deeper than 200 levels" in answer) == (depth > DEEPEST), answer


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/images/generations",
        "/v1/audio/speech",
    ],
)
async def test_nested_bodies_of_a_keyed_request(api: ApiUnderTest, path: str, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    headers = b"content-type: application/json\r\nidempotency-key: %d\r\n" % depth
    request = _request("POST", path, f'{{"a": {nested}}}'.encode(), headers=headers)
    _check(*await _answered(api, request))


def _form(*parts: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """A form's header and body, from its parts' headers and contents."""
    body = b"".join(b"--b0\r\n" + head + b"\r\n\r\n" + content + b"\r\n" for head, content in parts)
    return b"content-type: multipart/form-data; boundary=b0\r\n", body + b"--b0--\r\n"


CONTENT = (b'content-disposition: form-data; name="content"; filename="a.png"', PNG)
METADATA = b'content-disposition: form-data; name="metadata"'
raw = st.one_of(
    st.binary(max_size=40), odd_texts.map(lambda text: text.encode("utf-8", "surrogatepass"))
)
one_line = raw.map(lambda data: data.replace(b"\r", b"").replace(b"\n", b"").replace(b"\0", b""))


@ANY_NUMBER_OF_EXAMPLES
@given(
    metadata=st.one_of(
        values.map(_dumped), st.dictionaries(odd_texts, values, max_size=4).map(_dumped), raw
    )
)
async def test_metadata_of_files(api: ApiUnderTest, metadata: bytes) -> None:
    headers, body = _form(CONTENT, (METADATA, metadata))
    status, answer = await _answered(api, _request("POST", "/v1/files", body, headers=headers))
    _check(status, answer)
    if status == 201:
        made = json.loads(answer)
        status, found = await _answered(api, _request("GET", f"/v1/files/{made['id']}"))
        assert status == 200
        assert json.loads(found)["metadata"] == made["metadata"]


@pytest.mark.parametrize("depth", DEPTHS)
async def test_nested_metadata(api: ApiUnderTest, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    headers, body = _form(CONTENT, (METADATA, f'{{"a": {nested}}}'.encode()))
    status, answer = await _answered(api, _request("POST", "/v1/files", body, headers=headers))
    assert status == (201 if depth == DEPTHS[0] else 422), answer


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (rb'{"a": "\ud800"}', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": 1e999}', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
    ],
)
async def test_metadata_that_is_refused(api: ApiUnderTest, metadata: bytes, reason: str) -> None:
    headers, body = _form(CONTENT, (METADATA, metadata))
    status, answer = await _answered(api, _request("POST", "/v1/files", body, headers=headers))
    assert status == 422
    assert json.loads(answer)["invalid_fields"][0]["field"] == "metadata"
    assert reason in json.loads(answer)["detail"]


@ANY_NUMBER_OF_EXAMPLES
@given(
    parts=st.lists(
        st.one_of(
            st.just(CONTENT),
            st.tuples(
                st.builds(
                    lambda name, more: METADATA.replace(b"metadata", name) + more,
                    one_line,
                    one_line,
                ),
                raw,
            ),
            st.tuples(one_line, raw),
        ),
        max_size=6,
    ),
    header=st.one_of(
        st.none(),
        one_line.map(lambda text: b"content-type: multipart/form-data; " + text + b"\r\n"),
        one_line.map(
            lambda text: (
                b"content-type: multipart/form-data; boundary=b0; charset=" + text + b"\r\n"
            )
        ),
    ),
    path=st.sampled_from(["/v1/files", "/v1/images/edits"]),
    end=st.integers(0, 40),
)
async def test_forms(
    api: ApiUnderTest, parts: list[tuple[bytes, bytes]], header: bytes | None, path: str, end: int
) -> None:
    usual, body = _form(*parts)
    _check(
        *await _answered(
            api, _request("POST", path, body[: len(body) - end], headers=header or usual)
        )
    )


segments = st.one_of(
    st.binary(max_size=12).map(quote),
    st.sampled_from(
        [
            "%00",
            "%2f",
            "%2e%2e",
            "%ed%a0%80",
            "%",
            "%zz",
            "..",
            "[",
            "file_" + "0" * 24,
            "9" * 5000,
            "+",
        ]
    ),
)
PATHS = [
    "/{}",
    "/v1/files/{}",
    "/v1/predictions/{}",
    "/v1/predictions/{}/stream",
    "/v1/predictions/a/stream?record={}&expires={}&signature={}",
    "/v1/predictions?cursor={}",
    "/models?cursor={}",
    "/v1/models/{}/a",
    "/v1/models/a/{}/versions/{}",
    "/v1/deployments/{}/{}",
    "/v1/objects/{}?type=image/png&expires={}&signature={}",
    "/v1/models/{}",
    "/healthz?{}",
    "/v1/embeddings?{}",
]
HEADERS = [
    "last-event-id",
    "range",
    "if-none-match",
    "accept",
    "cookie",
    "authorization",
    "idempotency-key",
    "prefer",
]


@ANY_NUMBER_OF_EXAMPLES
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"]),
    path=st.sampled_from(PATHS),
    given_segments=st.tuples(segments, segments, segments),
    host=st.one_of(
        st.just(b"a"),
        st.sampled_from([b"[", b"[x", b"]", b"a:b", b"a:99999", b"@", b"a b", b"\xe9", b"/?#"]),
    ),
    name=st.sampled_from(HEADERS),
    value=one_line,
)
async def test_paths_and_headers(
    api: ApiUnderTest,
    method: str,
    path: str,
    given_segments: tuple[str, str, str],
    host: bytes,
    name: str,
    value: bytes,
) -> None:
    header = name.encode() + b": " + value + b"\r\n"
    asked = _request(method, path.format(*given_segments), b"", host, header)
    _check(*await _answered(api, asked))


PATHS_OF_JSON = ["/v1/predictions", "/v1/embeddings", "/v1/images/generations", "/v1/images/edits"]
JSON = b"content-type: application/json\r\n"


@pytest.mark.parametrize("path", PATHS_OF_JSON)
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"input": [' + b"1," * 300_000 + b"1]}", "300000 values"),
        (b'{"input": ["a"' + b",1" * 300_000 + b"]}", "300000 values"),
        (
            b"{" + b",".join(b'"k%d": 1' % number for number in range(20_001)) + b"}",
            "20000 strings and field names",
        ),
        (
            b'{"input": {' + b",".join(b'"k%d": 1' % number for number in range(20_001)) + b"}}",
            "20000 strings and field names",
        ),
        (b"[" + b'"",' * 20_001 + b'""]', "20000 strings and field names"),
    ],
    ids=["numbers", "wrong numbers", "fields", "fields of input", "texts"],
)
async def test_more_values_than_any_request_needs(
    api: ApiUnderTest, path: str, body: bytes, reason: str
) -> None:
    status, answer = await _answered(api, _request("POST", path, body, headers=JSON))
    assert status in (400, 422)
    assert reason.encode() in answer


async def test_commas_and_quotes_inside_texts_are_no_values(api: ApiUnderTest) -> None:
    texts = ['"quoted", ' * 2000 + "\\", *[f"{number}, " * 1000 for number in range(100)]]
    body = json.dumps({"model": TEXT_MODEL.name, "input": texts, "truncate": "end"}).encode()
    status, answer = await _answered(api, _request("POST", "/v1/embeddings", body, headers=JSON))
    assert status == 200, answer[:500]


async def test_only_the_first_wrong_element_is_told(api: ApiUnderTest) -> None:
    body = json.dumps({"version": TEXT_MODEL.name, "input": {"texts": [1] * 10_000}}).encode()
    status, answer = await _answered(api, _request("POST", "/v1/predictions", body, headers=JSON))
    assert status == 422
    assert [one["field"] for one in json.loads(answer)["invalid_fields"]] == ["input.texts[0]"]


async def test_input_of_too_many_fields_is_refused_as_a_whole(api: ApiUnderTest) -> None:
    given = {f"field {number}": 1 for number in range(101)}
    body = json.dumps({"version": TEXT_MODEL.name, "input": given}).encode()
    status, answer = await _answered(api, _request("POST", "/v1/predictions", body, headers=JSON))
    assert status == 422
    assert [one["field"] for one in json.loads(answer)["invalid_fields"]] == ["input"]
