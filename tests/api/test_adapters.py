"""`lora_weights` and `lora_scale` on every image endpoint."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.models.catalog import Catalog, Model
from shared.models.image_entry import Adapter
from shared.models.tasks.image import ChosenAdapter
from tests.api.harness import CATALOG, IMAGE_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import WAIT
from tests.api.test_images import drawn
from tests.api.test_masks import SOURCE, hole, uri, white

pytestmark = pytest.mark.anyio
DIGEST = f"sha256:{'a' * 64}"
ADAPTERS = {
    "ink": Adapter(source="local:ink.safetensors", digest=DIGEST, scale=0.8),
    "oil": Adapter(source="local:oil.safetensors"),
}
PAINTER = Model.model_validate(
    IMAGE_MODEL.model_copy(
        update={
            "name": "painter",
            "aliases": (),
            "image": IMAGE_MODEL.image.model_copy(update={"adapters": ADAPTERS}),
        }
    ).model_dump()
)
INK = ChosenAdapter("ink", DIGEST, 0.5)


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s")
    catalog = Catalog((PAINTER, *CATALOG.models))
    async with running_api(settings, catalog=catalog) as running:
        yield running


async def varied(api: ApiUnderTest, fields: dict[str, Any]) -> httpx.Response:
    """The response to a variations form."""
    files = {"image": ("a.png", SOURCE, "image/png")}
    form = {name: str(value) for name, value in fields.items()}
    return await api.http.post("/v1/images/variations", data=form, files=files)


WISH: dict[str, Any] = {"lora_weights": "ink", "lora_scale": 0.5, "seed": 1}


async def test_generations_edits_and_variations_have_adapters(api: ApiUnderTest) -> None:
    images = api.openai().images
    model: dict[str, Any] = {"model": "painter", "extra_body": WISH}
    await images.generate(prompt="a", **model)
    await images.edit(image=SOURCE, mask=hole(), prompt="a", **model)
    answer = await varied(api, {"model": "painter", **WISH})
    assert answer.status_code == 200
    body = {"prompt": "a", "images": [{"image_url": uri(SOURCE)}], "model": "painter", **WISH}
    answer = await api.http.post("/v1/images/edits", json=body)
    assert answer.status_code == 200
    assert [one.adapter for one in drawn(api)] == [INK] * 4
    assert drawn(api)[1].mask is not None


async def test_predictions_have_adapters(api: ApiUnderTest) -> None:
    wish = WISH | {"prompt": "a", "num_outputs": 2, "image": uri(SOURCE), "mask": uri(white())}
    answer = await api.http.post(
        "/v1/predictions", json={"version": "painter", "input": wish}, headers=WAIT
    )
    assert answer.json()["status"] == "succeeded"
    assert [one.adapter for one in drawn(api)] == [INK] * 2
    assert answer.json()["input"]["lora_weights"] == "ink"


async def test_the_catalog_has_the_scale_of_those_who_say_none(api: ApiUnderTest) -> None:
    for seed, name in enumerate(("ink", "oil", None)):
        wish = {"lora_weights": name, "lora_scale": None, "seed": seed}
        await api.openai().images.generate(prompt="a", model="painter", extra_body=wish)
    scales = [one.adapter and one.adapter.scale for one in drawn(api)]
    assert scales == [0.8, 1.0, None]


async def test_each_adapter_and_scale_has_separate_results(api: ApiUnderTest) -> None:
    wishes = [{}, {"lora_weights": "ink"}, {"lora_weights": "oil"}, WISH]
    hits = []
    for wish in [*wishes, *wishes, {"lora_weights": "ink", "lora_scale": 0.8}]:
        body = {"model": "painter", "prompt": "a", "seed": 1} | wish
        answer = await api.http.post("/v1/images/generations", json=body)
        hits.append(answer.headers["x-penstock-cache"])
    assert hits == ["miss"] * 4 + ["hit"] * 5


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("painter", {"lora_weights": "water"}, "lora_weights", "'water' is not an adapter of painter"),
    ("painter", {"lora_weights": "water"}, "lora_weights", "it has ink, oil"),
    ("painter", {"lora_scale": 1.0}, "lora_scale", "requires lora_weights"),
    ("painter", {"lora_weights": "ink", "lora_scale": 3.5}, "lora_scale", "less than or equal"),
    ("painter", {"lora_weights": "ink", "lora_scale": -1.5}, "lora_scale", "greater than or equal"),
    ("painter", {"lora_weights": 7}, "lora_weights", "string"),
    (IMAGE_MODEL.name, {"lora_weights": "ink"}, "lora_weights", "does not support adapters"),
]


@pytest.mark.parametrize(("model", "wish", "field", "reason"), WRONG, ids=str)
async def test_wrong_adapters_are_refused_with_what_is_right(
    api: ApiUnderTest, model: str, wish: dict[str, Any], field: str, reason: str
) -> None:
    body = {"model": model, "prompt": "a"} | wish
    edit = body | {"images": [{"image_url": uri(SOURCE)}]}
    for path, sent in (("/v1/images/generations", body), ("/v1/images/edits", edit)):
        answer = await api.http.post(path, json=sent)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), error
        assert reason in error["message"]
    if isinstance(wish.get("lora_weights", ""), str):
        answer = await varied(api, {"model": model} | wish)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    asked = {"version": model, "input": {"prompt": "a"} | wish}
    answer = await api.http.post("/v1/predictions", json=asked)
    assert answer.status_code == 422
    assert field in answer.text
    assert reason in answer.text
    assert not api.worker.items


async def test_schema_of_a_model_has_the_names_of_its_adapters(api: ApiUnderTest) -> None:
    fields = {}
    for name in ("painter", IMAGE_MODEL.name):
        answer = await api.http.get(f"/v1/models/anyone/{name}")
        schemas = answer.json()["latest_version"]["openapi_schema"]["components"]["schemas"]
        fields[name] = schemas["Input"]["properties"]
    names = fields["painter"]["lora_weights"]["anyOf"][0]
    assert names == {"enum": ["ink", "oil"], "type": "string"}
    scale = fields["painter"]["lora_scale"]["anyOf"][0]
    assert (scale["minimum"], scale["maximum"]) == (-1, 3)
    assert not {"lora_weights", "lora_scale"} & fields[IMAGE_MODEL.name].keys()
