"""Invalid requests get a 4xx that names the field and the reason, and nothing is published for
them.
"""

import io
import json
from collections.abc import AsyncIterator

import openai
import pytest
from PIL import Image

from tests.api.harness import IMAGE_MODEL, TEXT_MODEL, ApiUnderTest, running_api, settings_for

pytestmark = pytest.mark.anyio
TEXT = {"model": TEXT_MODEL.name}


@pytest.fixture(scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApiUnderTest]:
    """Shared by all tests: no request gets far enough to leave anything behind."""
    async with running_api(settings_for(tmp_path_factory.mktemp("api"))) as running:
        yield running


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({**TEXT, "input": ""}, "input", "at least 1 character"),
        ({**TEXT, "input": []}, "input", "at least 1 item"),
        (
            {**TEXT, "input": ["a", ""]},
            "input",
            "input[1]: String should have at least 1 character",
        ),
        ({**TEXT, "input": [[]]}, "input", "at least 1 item"),
        ({**TEXT, "input": ["a"] * 3000}, "input", "at most 2048 items, got 3000"),
        ({**TEXT, "input": "x" * 1_000_000}, "input", "must be at most 65536 bytes"),
        ({**TEXT, "input": [["1"]]}, "input", "valid integer"),
        ({**TEXT, "input": [-1]}, "input", "greater than or equal to 0"),
        (
            {**TEXT, "input": [1] * 20_000, "tokenizer": TEXT_MODEL.name},
            "input",
            "must be at most 16384 tokens",
        ),
        ({**TEXT, "input": [1]}, "input", "check_embedding_ctx_length=False"),
        ({**TEXT, "input": [[1], [2]]}, "input", f'"tokenizer": "{TEXT_MODEL.name}"'),
        (
            {**TEXT, "input": [1], "tokenizer": "cl100k_base"},
            "tokenizer",
            f'send "{TEXT_MODEL.name}"',
        ),
        ({**TEXT, "input": "a", "tokenizer": "cl100k_base"}, "tokenizer", "from its own tokenizer"),
        ({**TEXT, "input": "a", "truncate": "middle"}, "truncate", "'end' or 'start'"),
        ({**TEXT, "input": "a", "truncate": True}, "truncate", "'end' or 'start'"),
        ({**TEXT, "input": 5}, "input", "valid string"),
        ({**TEXT, "input": ["a", 5]}, "input", "input[1]: Input should be a valid string"),
        ({**TEXT, "input": {"text": "a"}}, "input", "input.file: Field required"),
        ({**TEXT}, "input", "Field required"),
        ({"input": "a"}, "model", "Field required"),
        ({**TEXT, "input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({**TEXT, "input": "a", "dimensions": 385}, "dimensions", "must be at most 384"),
        ({**TEXT, "input": "a", "dimensions": "5"}, "dimensions", "valid integer"),
        (
            {**TEXT, "input": "a", "encoding_format": "hex"},
            "encoding_format",
            "'float' or 'base64'",
        ),
        ({**TEXT, "input": "a", "dimension": 5}, "dimension", "unknown parameter"),
        ([1, 2], None, "body"),
    ],
)
async def test_embeddings(api: ApiUnderTest, body: object, param: str | None, reason: str) -> None:
    await _refused(api, "/v1/embeddings", body, param, reason)


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({}, "prompt", "Field required"),
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": 5}, "prompt", "valid string"),
        ({"prompt": "a", "n": 11}, "n", "less than or equal to 10"),
        ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
        (
            {"prompt": "a", "num_inference_steps": -1},
            "num_inference_steps",
            "greater than or equal to 1",
        ),
        (
            {"prompt": "a", "num_inference_steps": 101},
            "num_inference_steps",
            "must be at most 100 for",
        ),
        (
            {"prompt": "a", "scheduler": "magic"},
            "scheduler",
            "'magic' is not a known scheduler; use one of ",
        ),
        ({"prompt": "a", "clip_skip": -1}, "clip_skip", "greater than or equal to 0"),
        ({"prompt": "a", "guidance_rescale": 1.1}, "guidance_rescale", "less than or equal to 1"),
        ({"prompt": "a", "guidance_scale": -0.5}, "guidance_scale", "greater than or equal to 0"),
        ({"prompt": "a", "seed": -1}, "seed", "greater than or equal to 0"),
        ({"prompt": "a", "size": "64"}, "size", "match pattern"),
        ({"prompt": "a", "size": "60x64"}, "size", "multiples of 8"),
        ({"prompt": "a", "size": "1024x1024"}, "size", "exceeds the maximum of 262144"),
        ({"prompt": "a", "partial_images": 1}, "partial_images", "stream: true"),
        ({"prompt": "a", "response_format": "hex"}, "response_format", "'url' or 'b64_json'"),
        ({"prompt": "a", "output_format": "gif"}, "output_format", "'png', 'jpeg' or 'webp'"),
        ({"prompt": "a", "output_compression": 50}, "output_compression", "jpeg or webp"),
    ],
)
async def test_generations(api: ApiUnderTest, body: object, param: str | None, reason: str) -> None:
    await _refused(api, "/v1/images/generations", body, param, reason)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "gpt-9", "input": "a"}),
        ("/v1/embeddings", {"model": IMAGE_MODEL.name, "input": "a"}),
        ("/v1/images/generations", {"model": "gpt-9", "prompt": "a"}),
        ("/v1/images/generations", {"model": TEXT_MODEL.name, "prompt": "a"}),
    ],
)
async def test_unknown_model(api: ApiUnderTest, path: str, body: object) -> None:
    response = await api.http.post(path, json=body)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"
    assert not api.worker.jobs


async def test_unknown_model_for_the_client(api: ApiUnderTest) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await api.openai().embeddings.create(model="gpt-9", input="a")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "GET /v1/models" in caught.value.message
    assert TEXT_MODEL.name not in caught.value.message


@pytest.mark.parametrize(
    "body", [b"{", b"", b"\xff\xfe", b'{"input": "\\ud800", "model": "m"}', b"null"]
)
async def test_broken_json(api: ApiUnderTest, body: bytes) -> None:
    response = await api.http.post("/v1/embeddings", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_input"


@pytest.mark.parametrize("header", ["x-penstock-deadline-ms", "x-penstock-queue-limit-ms"])
@pytest.mark.parametrize("limit", ["0", "-5", "soon", "1.5", "\u0661"])
async def test_limit_that_is_no_number(api: ApiUnderTest, header: str, limit: str) -> None:
    headers = {header.encode(): limit.encode()}
    response = await api.http.post("/v1/embeddings", json={**TEXT, "input": "a"}, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == header


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


WHOLE = _png(Image.radial_gradient("L"))
HOLE_OF_ANOTHER_SIZE = _png(Image.new("RGBA", (64, 64)))
NO_HOLE = _png(Image.new("RGBA", (256, 256), "white"))
_speck = Image.new("RGBA", (256, 256), "white")
_speck.putpixel((40, 40), (0, 0, 0, 0))
SPECK = _png(_speck)
# A real PNG of 100 megapixels: 12 kB on the wire, 100 to 400 MB decoded.
BOMB = _png(Image.new("1", (10_000, 10_000)))


@pytest.mark.parametrize(
    ("files", "data", "param", "reason"),
    [
        ({"image": b"not an image"}, {}, "image", "not a valid PNG, JPEG, WebP, AVIF"),
        ({"image": b""}, {}, "image", "not a valid PNG, JPEG, WebP, AVIF"),
        ({"image": WHOLE[:5000]}, {}, "image", "not a valid PNG"),
        ({"image": WHOLE[:4000] + bytes(2000) + WHOLE[6000:]}, {}, "image", "not a valid PNG"),
        ({"image": BOMB}, {}, "image", "exceeds the maximum of 25 megapixels"),
        ({"image": WHOLE, "mask": WHOLE}, {}, "mask", "has no alpha channel"),
        ({"image": WHOLE, "mask": HOLE_OF_ANOTHER_SIZE}, {}, "mask", "64x64 pixels, but the image"),
        ({"image": WHOLE, "mask": NO_HOLE}, {}, "mask", "it has no transparent pixels"),
        (
            {"image": WHOLE, "mask": SPECK},
            {"mask_blur": "8"},
            "mask",
            "with mask_blur 8, nothing is left",
        ),
        ({"image": WHOLE, "mask": BOMB}, {}, "mask", "exceeds the maximum of 25 megapixels"),
        ({"image": WHOLE, "mask": WHOLE[:5000]}, {}, "mask", "not a valid PNG"),
        ({"image": WHOLE, "mask": b"no image"}, {}, "mask", "not a valid PNG, JPEG, WebP, AVIF"),
        ({"image": WHOLE}, {"mask": "a"}, "mask", "must be a file, not text"),
        ({"image": WHOLE}, {"mask_blur": "2"}, "mask_blur", "requires a mask"),
        ({"image": WHOLE, "mask": SPECK}, {"mask_blur": "65"}, "mask_blur", "less than or equal"),
        ({"photo": WHOLE}, {}, "image", "exactly one file is required, got 0"),
        ({"image": WHOLE, "image[]": WHOLE}, {}, "image", "got 2"),
        ({"image": WHOLE}, {"strength": "0"}, "strength", "greater than 0"),
        ({"image": WHOLE}, {"strength": "0.01"}, "strength", "less than one step"),
        ({"image": WHOLE}, {"n": "many"}, "n", "valid integer"),
        (
            {"image": WHOLE},
            {"num_inference_steps": "-1"},
            "num_inference_steps",
            "greater than or equal to 1",
        ),
        ({"image": WHOLE, "prompt": b"a"}, {}, "prompt", "must not be a file"),
    ],
)
async def test_edits(
    api: ApiUnderTest, files: dict[str, bytes], data: dict[str, str], param: str, reason: str
) -> None:
    given = {"prompt": "a", **data} if "prompt" not in files else data
    response = await api.http.post("/v1/images/edits", files=files, data=given)
    _check_refusal(api, response.status_code, response.content, param, reason)


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([], "at least 1 item"),
        ([{"image_url": "https://example.com/a.png"}], "does not fetch other URLs"),
        ([{"image_url": "data:image/png;base64,%%%"}], "not valid base64"),
        ([{"image_url": "data:image/png,abc"}], "must be a base64 data: URI"),
        ([{"file_id": "file-1"}], "Field required"),
    ],
)
async def test_edits_as_json(api: ApiUnderTest, images: object, reason: str) -> None:
    await _refused(api, "/v1/images/edits", {"prompt": "a", "images": images}, "images", reason)


async def test_edit_that_is_no_form(api: ApiUnderTest) -> None:
    response = await api.http.post(
        "/v1/images/edits", content=b"a=b", headers={"content-type": "text/plain"}
    )
    _check_refusal(api, response.status_code, response.content, "content-type", "must be multipart")


async def test_form_without_boundary(api: ApiUnderTest) -> None:
    headers = {"content-type": "multipart/form-data"}
    response = await api.http.post("/v1/images/edits", content=b"a=b", headers=headers)
    _check_refusal(api, response.status_code, response.content, None, "boundary")


async def _refused(
    api: ApiUnderTest, path: str, body: object, param: str | None, reason: str
) -> None:
    response = await api.http.post(path, json=body)
    _check_refusal(api, response.status_code, response.content, param, reason)


def _check_refusal(
    api: ApiUnderTest, status: int, content: bytes, param: str | None, reason: str
) -> None:
    error = json.loads(content)["error"]
    assert status == 400, error
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"], reason in error["message"]) == (param, True), error
    assert not api.worker.jobs
    assert {row.status for row in api.rows} == {"refused"}
