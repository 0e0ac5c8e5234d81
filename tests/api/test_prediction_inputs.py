"""Prediction inputs and outputs: texts, images, files, links, models, and errors in Replicate's
format.
"""

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.models.tasks.embedding import TextInput
from shared.models.tasks.image import ImageInput
from shared.stores.objects import ObjectStore
from tests.api.fake_worker import png_of, vector_of
from tests.api.harness import (
    IMAGE_MODEL,
    TEXT_MODEL,
    ApiUnderTest,
    api_with_redis,
)
from tests.api.predicting import TEXT, WAIT, data_of

pytestmark = pytest.mark.anyio


api = api_with_redis(secret="s", fetch_hosts="*")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"text": "a"}, ["a"]),
        ({"input": "a"}, ["a"]),
        ({"texts": ["a", "b"]}, ["a", "b"]),
        ({"input": ["a"]}, ["a"]),
    ],
)
async def test_texts_come_in_several_shapes(
    api: ApiUnderTest, given: dict[str, Any], expected: list[str]
) -> None:
    path = f"/v1/models/anyone/{TEXT_MODEL.aliases[0]}/predictions"
    found = (await api.http.post(path, json={"input": given}, headers=WAIT)).json()
    vectors = [pytest.approx(vector_of(TextInput(text)).tolist()) for text in expected]
    assert found["output"] == (
        vectors if isinstance(next(iter(given.values())), list) else vectors[0]
    )
    assert found["model"] == f"anyone/{TEXT_MODEL.name}"
    assert len(api.worker.jobs) == 1


async def test_images_are_drawn_as_asked(api: ApiUnderTest) -> None:
    given = {
        "prompt": "a lighthouse",
        "negative_prompt": "fog",
        "width": 72,
        "height": 64,
        "num_inference_steps": 3,
        "guidance_scale": 2,
        "seed": 5,
        "scheduler": "euler",
        "num_outputs": 2,
    }
    path = f"/v1/deployments/acme/{IMAGE_MODEL.name}/predictions"
    found = (await api.http.post(path, json={"input": given}, headers=WAIT)).json()
    expected = [ImageInput("a lighthouse", 72, 64, 3, 2.0, seed, "euler", "fog") for seed in (5, 6)]
    assert [item.input for item in api.worker.items] == expected
    assert all(item.cache_key for item in api.worker.items)
    assert [data_of(url) for url in found["output"]] == [png_of(image) for image in expected]
    assert found["deployment"] == f"acme/{IMAGE_MODEL.name}"


@pytest.mark.parametrize(
    ("output_format", "magic", "is_large"),
    [
        ("webp", b"RIFF", False),
        ("jpg", b"\xff\xd8", False),
        ("webp", b"RIFF", True),
        ("jpg", b"\xff\xd8", True),
        ("png", b"\x89PNG", True),
    ],
)
async def test_links_lead_to_images_in_the_format_asked_for(
    api: ApiUnderTest, tmp_path: Path, output_format: str, magic: bytes, is_large: bool
) -> None:
    if is_large:
        api.worker.stores_results_in = ObjectStore(f"file://{tmp_path}/objects")
    image = await api.http.get(url := await url_of_image(api, output_format))
    assert image.status_code == 200
    assert image.content.startswith(magic)
    assert (await api.http.get(url.replace("signature=", "signature=0"))).status_code == 403


async def test_a_small_png_is_in_its_url(api: ApiUnderTest) -> None:
    assert data_of(await url_of_image(api, "png")).startswith(b"\x89PNG")


async def url_of_image(api: ApiUnderTest, output_format: str) -> str:
    body = {"version": IMAGE_MODEL.name, "input": {"prompt": "a", "output_format": output_format}}
    (url,) = (await api.http.post("/v1/predictions", json=body, headers=WAIT)).json()["output"]
    return str(url)


async def test_url_of_a_file_is_bounded(api: ApiUnderTest) -> None:
    """Even the parts of a URL that are never looked at are stored in the record."""
    png = png_of(ImageInput("a", 64, 64, 1, 1.0, 1, "ddim"))
    sent = (await api.http.post("/v1/files", files={"content": ("a.png", png, "image/png")})).json()
    wish = {"prompt": "a", "image": f"{sent['urls']['get']}?{'x' * 3000}"}
    answer = await api.http.post(
        "/v1/predictions", json={"version": IMAGE_MODEL.name, "input": wish}
    )
    assert (answer.status_code, answer.json()["invalid_fields"][0]["field"]) == (422, "input.image")
    assert "must be at most 2048 characters" in answer.text


async def test_source_images_come_as_data_file_or_earlier_result(api: ApiUnderTest) -> None:
    png = png_of(ImageInput("", 64, 64, 1, 1.0, 99, "ddim"))
    uri = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    sent = (await api.http.post("/v1/files", files={"content": ("a.png", png, "image/png")})).json()
    body = {
        "version": IMAGE_MODEL.name,
        "input": {"prompt": "a", "output_format": "webp", "seed": 1},
    }
    result = (await api.http.post("/v1/predictions", json=body, headers=WAIT)).json()["output"][0]
    given = [uri, sent["urls"]["get"], sent["urls"]["download"], result]
    for image in given:
        wish = {"prompt": "a", "image": image, "prompt_strength": 0.5, "seed": 1}
        found = (
            await api.http.post(
                "/v1/predictions", json={"version": IMAGE_MODEL.name, "input": wish}, headers=WAIT
            )
        ).json()
        assert found["status"] == "succeeded"
    sources = [item.input.image for item in api.worker.items if isinstance(item.input, ImageInput)]
    assert [source is not None for source in sources] == [False, True, True, True, True]
    assert sources[1] == sources[2] == sources[3]
    listed = (await api.http.get("/v1/predictions")).json()["results"]
    kept = listed[3]["input"]["image"]
    assert kept.startswith(f"{api.url}/v1/files/file_")
    assert (
        await api.http.get((await api.http.get(kept)).json()["urls"]["download"])
    ).content == png


@pytest.mark.parametrize(
    "form",
    [{"files": {"content": b"x"}}, {"files": {"file": b"x"}, "data": {"purpose": "user_data"}}],
    ids=["Replicate's file", "OpenAI's file"],
)
async def test_a_damaged_file_in_the_store_is_not_the_callers_fault(
    api: ApiUnderTest, tmp_path: Path, form: dict[str, Any]
) -> None:
    sent = (await api.http.post("/v1/files", **form)).json()
    (document,) = (tmp_path / "objects").rglob("file.json")
    document.write_bytes(document.read_bytes()[:20])
    wish = {"prompt": "a", "image": f"{api.url}/v1/files/{sent['id']}"}
    async with httpx.AsyncClient(base_url=api.url) as client:  # the OpenAPI document lists no 500
        answer = await client.post(
            "/v1/predictions", json={"version": IMAGE_MODEL.name, "input": wish}
        )
    assert (answer.status_code, answer.json()["detail"]) == (500, "internal error; try again")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("signature=", "signature=0"), "the link's signature is invalid"),
        (("signature=", "other="), "not a link signed by this API"),
        (("expires=", "expires=x"), "not a link signed by this API"),
    ],
    ids=["changed", "no signature", "no time"],
)
async def test_links_to_results_must_be_signed(
    api: ApiUnderTest, change: tuple[str, str], reason: str
) -> None:
    wish = {"prompt": "a", "image": (await url_of_image(api, "webp")).replace(*change)}
    answer = await api.http.post(
        "/v1/predictions", json={"version": IMAGE_MODEL.name, "input": wish}
    )
    assert (answer.status_code, answer.json()["detail"]) == (422, f"- input.image: {reason}")


async def test_private_urls_are_not_fetched(api: ApiUnderTest) -> None:
    fetched = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fetched.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        for url, reason in (
            (f"http://127.0.0.1:{port}/a.png", "must be an https URL"),
            (f"https://127.0.0.1:{port}/a.png", "not public"),
            (f"{api.url}@127.0.0.1:{port}/v1/files/x", "must be an https URL"),
            ("file:///etc/passwd", "must be a data: URI"),
        ):
            body = {"version": IMAGE_MODEL.name, "input": {"prompt": "a", "image": url}}
            response = await api.http.post("/v1/predictions", json=body)
            assert response.status_code == 422
            assert reason in response.json()["detail"]
    assert not fetched.is_set()


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/v1/predictions", {"input": {"text": "a"}}, 422, "version"),
        ("/v1/predictions", {"version": "gpt-9", "input": {}}, 422, "version"),
        ("/v1/predictions", {"version": IMAGE_MODEL.name, "input": {}}, 422, "input.prompt"),
        (
            "/v1/predictions",
            {"version": IMAGE_MODEL.name, "input": {"prompt": "a", "steps": 3}},
            422,
            "input.steps",
        ),
        (
            "/v1/predictions",
            {"version": IMAGE_MODEL.name, "input": {"prompt": "a", "width": 3}},
            422,
            "input.size",
        ),
        ("/v1/predictions", TEXT | {"input": {"text": "a", "texts": ["b"]}}, 422, "input"),
        ("/v1/predictions", TEXT | {"input": {"texts": ["a"] * 129}}, 422, "input.texts"),
        ("/v1/predictions", TEXT | {"webhook": "ftp://a"}, 422, "webhook"),
        (
            "/v1/predictions",
            TEXT | {"webhook_events_filter": ["end"]},
            422,
            "webhook_events_filter[0]",
        ),
        ("/v1/models/a/gpt-9/predictions", {"input": {}}, 404, None),
    ],
)
async def test_wrong_requests_are_told_in_replicates_shape(
    api: ApiUnderTest, path: str, body: dict[str, Any], status: int, field: str | None
) -> None:
    response = await api.http.post(path, json=body)
    problem = response.json()
    assert response.status_code == problem["status"] == status
    assert problem["detail"]
    assert [one["field"] for one in problem.get("invalid_fields", [])] == ([field] if field else [])
    assert not api.worker.jobs


async def test_models_versions_and_paths_without_v1(api: ApiUnderTest) -> None:
    model = (await api.http.get(f"/models/anyone/{TEXT_MODEL.name}")).json()
    version = model["latest_version"]
    assert (
        await api.http.get(f"/v1/models/x/{TEXT_MODEL.name}/versions/{version['id']}")
    ).json() == version
    assert (
        await api.http.get(f"/v1/models/x/{IMAGE_MODEL.name}/versions/{version['id']}")
    ).status_code == 404
    assert "texts" in version["openapi_schema"]["components"]["schemas"]["Input"]["properties"]
    body = TEXT | {"version": version["id"]}
    found = (await api.http.post("/predictions", json=body, headers=WAIT)).json()
    assert (found["status"], found["version"]) == ("succeeded", version["id"])
    assert (await api.http.get(f"/predictions/{found['id']}")).json() == found
