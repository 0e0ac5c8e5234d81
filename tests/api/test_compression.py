"""Large responses with floats are compressed for clients that request it; other responses stay
unchanged.
"""

from pathlib import Path

import pytest

from api.http.fast_route import MIN_BYTES, accepts_gzip
from tests.api.harness import IMAGE_MODEL, TEXT_MODEL, ApiUnderTest, running_api, settings_for

pytestmark = pytest.mark.anyio
MANY = {"model": TEXT_MODEL.name, "input": [f"text {number}" for number in range(40)]}
GZIP = {"accept-encoding": "gzip, deflate"}
NONE = {"accept-encoding": "identity"}


async def test_many_floats_shrink_to_half_for_those_who_ask(api: ApiUnderTest) -> None:
    plain = await api.http.post("/v1/embeddings", json=MANY, headers=NONE)
    assert "content-encoding" not in plain.headers
    assert len(plain.content) > MIN_BYTES
    async with api.http.stream("POST", "/v1/embeddings", json=MANY, headers=GZIP) as response:
        raw = b"".join([piece async for piece in response.aiter_raw()])
        assert (response.headers["content-encoding"], response.headers["vary"]) == (
            "gzip",
            "accept-encoding",
        )
        assert int(response.headers["content-length"]) == len(raw) < len(plain.content) * 0.6
    assert (await api.http.post("/v1/embeddings", json=MANY, headers=GZIP)).json()[
        "data"
    ] == plain.json()["data"]
    assert plain.headers["vary"] == "accept-encoding"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", MANY | {"input": "one text"}),
        ("/v1/embeddings", MANY | {"encoding_format": "base64"}),
        ("/v1/images/generations", {"model": IMAGE_MODEL.name, "prompt": "a", "n": 4}),
        ("/v1/embeddings", MANY | {"input": ["x" * 70_000]}),
    ],
    ids=["small", "base64", "image", "refused"],
)
async def test_what_would_not_pay_is_left_alone(
    api: ApiUnderTest, path: str, body: dict[str, object]
) -> None:
    response = await api.http.post(path, json=body, headers=GZIP)
    assert "content-encoding" not in response.headers


async def test_repeated_answer_is_for_whoever_repeats_it(tmp_path: Path, redis_url: str) -> None:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        answers = [
            await api.http.post(
                "/v1/embeddings", json=MANY, headers={**accepted, "idempotency-key": "k"}
            )
            for accepted in (GZIP, NONE, GZIP)
        ]
        assert "content-encoding" not in answers[1].headers
        assert answers[0].json() == answers[1].json() == answers[2].json()


async def test_both_clients_read_it(api: ApiUnderTest) -> None:
    """OpenAI's clients request gzip with every request."""
    as_floats = await api.openai().embeddings.create(**MANY, encoding_format="float")
    by_default = await api.openai().embeddings.create(**MANY)
    for one, other in zip(as_floats.data, by_default.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)


@pytest.mark.parametrize(
    ("accepted", "takes"),
    [
        ("", False),
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("br;q=1.0, *", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, *;q=1", False),
        ("*;q=0", False),
        ("identity", False),
        ("x-gzippy", False),
    ],
)
def test_who_accepts_gzip(accepted: str, takes: bool) -> None:
    assert accepts_gzip(accepted) is takes
