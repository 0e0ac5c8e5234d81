"""IP-Adapters in requests: what callers may send, and what workers get."""

import base64
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from api.openai.images import GenerationsEndpoint
from shared.catalog import Catalog
from shared.catalog_entry import Control, IpAdapter
from shared.errors import BadInput
from shared.tasks.image import ImageInput, IpAdapterInput
from tests.api.batches.batching import answers, batching, created, jsonl, until
from tests.api.harness import CATALOG, IMAGE_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import WAIT
from tests.api.test_images import drawn, encoded

pytestmark = pytest.mark.anyio
KNOWN = {
    "style": IpAdapter(source="local:a", weight_name="a.safetensors", scale=0.6),
    "face": IpAdapter(source="local:a", subfolder="models", weight_name="b.safetensors"),
}
WITH_SOME = IMAGE_MODEL.model_copy(
    update={
        "name": "with-ip-adapters",
        "aliases": (),
        "image": IMAGE_MODEL.image.model_copy(
            update={"ip_adapters": KNOWN, "controls": {"depth": Control(source="local:b")}}
        ),
    }
)
PICTURE = encoded(Image.radial_gradient("L").resize((130, 71)).convert("RGB"))
SOURCE = encoded(Image.linear_gradient("L").resize((64, 64)).convert("RGB"))


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    catalog = Catalog((WITH_SOME, *CATALOG.models))
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s")
    async with running_api(settings, catalog=catalog) as running:
        yield running


def uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def ip_adapter_of(given: ImageInput) -> IpAdapterInput:
    assert given.ip_adapter is not None
    return given.ip_adapter


def pixels(png: bytes | None) -> np.ndarray:
    with Image.open(io.BytesIO(png or b"")) as image:
        assert image.mode == "RGB"
        return np.asarray(image)


async def predicted(api: ApiUnderTest, wish: dict[str, Any]) -> Any:
    body = {"version": WITH_SOME.name, "input": {"prompt": "a", "seed": 1} | wish}
    return await api.http.post("/v1/predictions", json=body, headers=WAIT)


async def test_prediction_has_the_pixels_of_its_image_and_the_usual_size(
    api: ApiUnderTest,
) -> None:
    wish = {"ip_adapter": "style", "ip_adapter_image": uri(PICTURE)}
    made = await predicted(api, wish)
    assert made.json()["status"] == "succeeded", made.text
    (given,) = drawn(api)
    assert given.image is None
    assert (given.width, given.height) == (WITH_SOME.image.width, WITH_SOME.image.height)
    chosen = ip_adapter_of(given)
    assert (chosen.name, chosen.version, chosen.scale) == ("style", KNOWN["style"].version, 0.6)
    assert np.array_equal(pixels(chosen.image.data), pixels(PICTURE))
    shown = made.json()["input"]["ip_adapter_image"]
    assert shown.startswith(f"{api.url}/v1/files/file_")
    file = (await api.http.get(shown)).json()
    assert (await api.http.get(file["urls"]["download"])).content == PICTURE


async def test_prediction_has_source_control_and_ip_adapter(api: ApiUnderTest) -> None:
    files = {"content": ("a.png", PICTURE, "image/png")}
    made = (await api.http.post("/v1/files", files=files)).json()
    wish = {
        "image": uri(SOURCE),
        "control": "depth",
        "control_image": uri(SOURCE),
        "ip_adapter": "face",
        "ip_adapter_image": made["urls"]["get"],
        "ip_adapter_scale": 1.5,
        "num_outputs": 2,
    }
    answer = await predicted(api, wish)
    assert answer.json()["status"] == "succeeded", answer.text
    first, second = drawn(api)
    assert (first.width, first.height) == (64, 64)
    assert first.control is not None
    chosen = ip_adapter_of(first)
    assert (chosen.name, chosen.scale) == ("face", 1.5)
    assert np.array_equal(pixels(chosen.image.data), pixels(PICTURE))
    assert ip_adapter_of(second) == chosen
    again = await predicted(api, wish | {"ip_adapter_scale": 1.4})
    assert again.json()["status"] == "succeeded", again.text
    assert len(drawn(api)) == 4, "the scale counts in the key of the cache"


async def test_large_images_are_shrunk(api: ApiUnderTest) -> None:
    large = encoded(Image.new("RGB", (2048, 1024), (1, 2, 3)))
    wish = {"ip_adapter": "style", "ip_adapter_image": uri(large)}
    assert (await predicted(api, wish)).json()["status"] == "succeeded"
    assert pixels(ip_adapter_of(drawn(api)[0]).image.data).shape == (724, 1448, 3)


async def test_openais_clients_send_ip_adapters(api: ApiUnderTest) -> None:
    extra = {"ip_adapter": "style", "ip_adapter_image": uri(PICTURE), "seed": 1}
    await api.openai().images.generate(model=WITH_SOME.name, prompt="a", extra_body=extra)
    assert ip_adapter_of(drawn(api)[0]).scale == 0.6
    await api.openai().images.edit(
        model=WITH_SOME.name, image=SOURCE, prompt="a", extra_body=extra | {"seed": 2}
    )
    edited = drawn(api)[1]
    assert edited.image is not None
    assert np.array_equal(pixels(ip_adapter_of(edited).image.data), pixels(PICTURE))


@pytest.mark.parametrize("path", ["edits", "variations"])
async def test_image_may_be_a_file_of_a_form(api: ApiUnderTest, path: str) -> None:
    fields = {"model": WITH_SOME.name, "ip_adapter": "face", "seed": "1"}
    fields |= {} if path == "variations" else {"prompt": "a"}
    files = {"image": SOURCE, "ip_adapter_image": PICTURE, "control_image": SOURCE}
    answer = await api.http.post(
        f"/v1/images/{path}", files=files, data=fields | {"control": "depth"}
    )
    assert answer.status_code == 200, answer.text
    (given,) = drawn(api)
    assert ip_adapter_of(given).name == "face"
    assert given.control is not None
    without = {"image": SOURCE, "ip_adapter_image": PICTURE}
    del fields["ip_adapter"]
    answer = await api.http.post(f"/v1/images/{path}", files=without, data=fields)
    assert answer.json()["error"]["param"] == "ip_adapter_image", answer.text


async def test_edit_in_json_has_an_ip_adapter_in_its_stream(api: ApiUnderTest) -> None:
    body = {
        "model": WITH_SOME.name,
        "prompt": "a",
        "images": [{"image_url": uri(SOURCE)}],
        "ip_adapter": "style",
        "ip_adapter_image": uri(PICTURE),
        "stream": True,
    }
    answer = await api.http.post("/v1/images/edits", json=body)
    assert "image_edit.completed" in answer.text
    assert ip_adapter_of(drawn(api)[0]).name == "style"


RIGHT = {"ip_adapter": "style", "ip_adapter_image": uri(PICTURE)}
WRONG = [
    (RIGHT | {"ip_adapter": "other"}, "ip_adapter", "it has style, face"),
    ({"ip_adapter": "style"}, "ip_adapter_image", "give the image"),
    ({"ip_adapter_image": uri(PICTURE)}, "ip_adapter_image", "is for ip_adapter"),
    ({"ip_adapter_scale": 0.5}, "ip_adapter_scale", "is for ip_adapter"),
    (RIGHT | {"ip_adapter_image": uri(b"no image")}, "ip_adapter_image", "not a PNG"),
    (RIGHT | {"ip_adapter_image": "a.png"}, "ip_adapter_image", "expected a data: URI"),
    (RIGHT | {"ip_adapter_scale": 2.1}, "ip_adapter_scale", "less than or equal to 2"),
    (RIGHT | {"ip_adapter_scale": -0.1}, "ip_adapter_scale", "greater than or equal to 0"),
]


@pytest.mark.parametrize(("wish", "field", "reason"), WRONG, ids=lambda value: str(value)[:40])
async def test_wrong_ip_adapters_are_refused_by_name_at_all_doors(
    api: ApiUnderTest, wish: dict[str, Any], field: str, reason: str
) -> None:
    answer = await predicted(api, wish)
    assert answer.status_code == 422, answer.text
    assert [one["field"] for one in answer.json()["invalid_fields"]] == [f"input.{field}"]
    assert reason in answer.text
    body: dict[str, Any] = {"model": WITH_SOME.name, "prompt": "a"} | wish
    edit = body | {"images": [{"image_url": uri(SOURCE)}]}
    for path, sent in (("generations", body), ("edits", edit)):
        refused = await api.http.post(f"/v1/images/{path}", json=sent)
        assert refused.status_code == 400, (path, refused.text)
        assert refused.json()["error"]["param"] == field, (path, refused.text)
        assert reason in refused.text
    form = {name: str(value) for name, value in body.items()}
    refused = await api.http.post("/v1/images/edits", files={"image": SOURCE}, data=form)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text
    assert not drawn(api)


async def test_model_without_ip_adapters_takes_none_and_shows_none(api: ApiUnderTest) -> None:
    body = {"version": IMAGE_MODEL.name, "input": RIGHT | {"prompt": "a"}}
    answer = await api.http.post("/v1/predictions", json=body, headers=WAIT)
    assert answer.status_code == 422
    assert [one["field"] for one in answer.json()["invalid_fields"]] == ["input.ip_adapter"]
    assert "leave it out" in answer.text
    fields = {}
    for name in (IMAGE_MODEL.name, WITH_SOME.name):
        made = (await api.http.get(f"/v1/models/penstock/{name}/versions")).json()["results"]
        schemas = made[0]["openapi_schema"]["components"]["schemas"]
        fields[name] = schemas["Input"]["properties"]
    assert not any(name.startswith("ip_adapter") for name in fields[IMAGE_MODEL.name])
    assert fields[WITH_SOME.name]["ip_adapter"]["anyOf"][0]["enum"] == ["face", "style"]
    document = (await api.http.get("/openapi.json")).json()["components"]["schemas"]
    assert "ip_adapter_scale" in document["GenerationBody"]["properties"]
    assert document["EditForm"]["properties"]["ip_adapter"]["enum"] == ["face", "style"]


async def test_catalog_without_ip_adapters_documents_none(tmp_path: Path, redis_url: str) -> None:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        document = (await api.http.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("GenerationBody", "EditForm", "EditBody", "VariationForm"):
        assert not any(field.startswith("ip_adapter") for field in document[name]["properties"])


async def test_lines_of_batches_have_ip_adapters(tmp_path: Path, redis_url: str) -> None:
    """One whose image is broken fails alone."""
    wish = {"model": WITH_SOME.name, "prompt": "a", "seed": 1, "ip_adapter": "style"}
    images = {"a": uri(PICTURE), "b": uri(b"no image"), "c": uri(SOURCE)}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/images/generations",
            "body": wish | {"ip_adapter_image": image},
        }
        for name, image in images.items()
    ]
    async with batching(tmp_path, redis_url, catalog=Catalog((WITH_SOME,))) as (api, _):
        client = api.openai()
        batch = await created(client, jsonl(lines), "/v1/images/generations")
        done = await until(client, batch)
        right = [one["custom_id"] for one in await answers(client, done.output_file_id)]
        assert right == ["a", "c"]
        (error,) = await answers(client, done.error_file_id)
        assert error["response"]["body"]["error"]["param"] == "ip_adapter_image"
        shapes = {pixels(ip_adapter_of(one).image.data).shape for one in drawn(api)}
    assert shapes == {(71, 130, 3), (64, 64, 3)}


def test_line_of_a_batch_names_an_ip_adapter_of_its_model() -> None:
    line = {"model": WITH_SOME.name, "prompt": "a", "ip_adapter": "b", "ip_adapter_image": "file_a"}
    with pytest.raises(BadInput) as caught:
        GenerationsEndpoint().read(json.dumps(line).encode(), Catalog((WITH_SOME,)), 1)
    assert caught.value.field == "ip_adapter"
