"""Image models with a known interface: the inputs the API accepts and rejects, and how it describes
them.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.models.catalog import Catalog
from shared.models.image_interface import ImageInterface, ImageUsuals
from tests.api.harness import CATALOG, IMAGE_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import WAIT
from tests.api.test_images import drawn
from tests.api.test_masks import SOURCE, hole, uri, white

pytestmark = pytest.mark.anyio
USUALS = ImageUsuals(
    width=64, height=64, steps=8, guidance_scale=3.5, scheduler="default", multiple=16
)


def model_with(name: str, interface: ImageInterface) -> Any:
    image = IMAGE_MODEL.image.model_copy(update={"interface": interface, "scheduler": "default"})
    return IMAGE_MODEL.model_copy(update={"name": name, "aliases": (), "image": image})


EDITOR = model_with(
    "editor",
    ImageInterface(
        pipeline="FluxKontextPipeline",
        tasks=("text", "image"),
        fields=("guidance_scale",),
        schedulers=("default", "euler"),
        defaults=USUALS,
    ),
)
REDRAWER = model_with(
    "redrawer",
    ImageInterface(
        pipeline="QwenImageEditPipeline",
        tasks=("image",),
        fields=("negative_prompt",),
        schedulers=("default",),
        defaults=USUALS,
    ),
)
FILLER = model_with(
    "filler",
    ImageInterface(
        pipeline="FluxFillPipeline",
        tasks=("mask",),
        fields=("guidance_scale", "strength"),
        schedulers=("default",),
        defaults=USUALS,
    ),
)


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s")
    async with running_api(settings, catalog=Catalog((EDITOR, REDRAWER, FILLER))) as running:
        yield running


async def predict(api: ApiUnderTest, model: str, wish: dict[str, Any]) -> Any:
    body = {"version": model, "input": {"prompt": "a", "seed": 1} | wish}
    return await api.http.post("/v1/predictions", json=body, headers=WAIT)


@pytest.mark.parametrize(
    ("model", "wish", "field"),
    [
        ("editor", {"negative_prompt": "fog"}, "negative_prompt"),
        ("editor", {"clip_skip": 1}, "clip_skip"),
        ("editor", {"guidance_rescale": 0.5}, "guidance_rescale"),
        ("editor", {"scheduler": "ddim"}, "scheduler"),
        ("editor", {"image": uri(SOURCE), "strength": 0.5}, "strength"),
        ("editor", {"image": uri(SOURCE), "prompt_strength": 0.5}, "prompt_strength"),
        ("editor", {"image": uri(SOURCE), "mask": uri(SOURCE)}, "mask"),
        ("editor", {"image": uri(SOURCE), "padding": 8}, "padding"),
        ("redrawer", {}, "image"),
        ("redrawer", {"image": uri(SOURCE), "guidance_scale": 2.0}, "guidance_scale"),
    ],
    ids=str,
)
async def test_a_field_that_the_pipeline_lacks_is_refused_by_name(
    api: ApiUnderTest, model: str, wish: dict[str, Any], field: str
) -> None:
    answer = await predict(api, model, wish)
    assert answer.status_code == 422, answer.text
    assert field in answer.text
    assert not drawn(api)


@pytest.mark.parametrize(
    "wish", [{"negative_prompt": "fog"}, {"scheduler": "ddim"}, {"clip_skip": 1}], ids=str
)
async def test_openais_generations_refuse_the_same(api: ApiUnderTest, wish: dict[str, Any]) -> None:
    body = {"model": "editor", "prompt": "a", **wish}
    answer = await api.http.post("/v1/images/generations", json=body)
    assert answer.status_code == 400
    (field,) = wish
    assert answer.json()["error"]["param"] == field
    assert not drawn(api)


@pytest.mark.parametrize(
    ("form", "files", "field"),
    [
        ({"strength": 0.5}, {}, "strength"),
        ({}, {"mask": ("a.png", hole(), "image/png")}, "mask"),
    ],
    ids=["strength", "mask"],
)
async def test_openais_edits_refuse_the_same(
    api: ApiUnderTest, form: dict[str, Any], files: dict[str, Any], field: str
) -> None:
    answer = await api.http.post(
        "/v1/images/edits",
        data={"model": "editor", "prompt": "a", **form},
        files={"image": ("a.png", SOURCE, "image/png"), **files},
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert not drawn(api)


async def test_an_edit_without_a_strength_reserves_and_draws_all_steps(api: ApiUnderTest) -> None:
    answer = await predict(api, "editor", {"image": uri(SOURCE), "num_inference_steps": 8})
    assert answer.json()["status"] == "succeeded", answer.text
    await api.openai().images.edit(
        model="editor", image=SOURCE, prompt="b", extra_body={"num_inference_steps": 8}
    )
    for given in drawn(api):
        assert given.image is not None
        assert given.strength is None
        pixel_steps = given.width * given.height * 8
        assert given.estimate_work(EDITOR) == given.bound_work(EDITOR).work == pixel_steps


async def test_a_model_for_masks_needs_a_mask(api: ApiUnderTest) -> None:
    masked = {"image": uri(SOURCE), "mask": uri(white())}
    answer = await predict(api, "filler", masked)
    assert answer.json()["status"] == "succeeded", answer.text
    assert drawn(api)[0].strength == 0.8
    answer = await predict(api, "filler", {"image": uri(SOURCE)})
    assert answer.status_code == 422
    assert "only draws within the mask of an image" in answer.text


async def test_a_variation_needs_no_guidance(api: ApiUnderTest) -> None:
    files = {"image": ("a.png", SOURCE, "image/png")}
    answer = await api.http.post("/v1/images/variations", data={"model": "redrawer"}, files=files)
    assert answer.status_code == 200, answer.text
    assert drawn(api)[0].guidance_scale == REDRAWER.image.guidance_scale


async def test_openapi_has_what_the_served_models_accept(
    api: ApiUnderTest, page: dict[str, Any]
) -> None:
    schemas = page["components"]["schemas"]
    fields = schemas["GenerationBody"]["properties"]
    assert {"guidance_scale", "negative_prompt", "num_inference_steps"} <= fields.keys()
    assert not {"clip_skip", "guidance_rescale", "control"} & fields.keys()
    assert fields["scheduler"]["anyOf"][0]["enum"] == ["default", "euler"]
    assert {"strength", "mask", "mask_blur"} <= schemas["EditForm"]["properties"].keys()
    version = (await api.http.get("/v1/models/penstock/redrawer")).json()["latest_version"]
    described = version["openapi_schema"]["components"]["schemas"]["Input"]
    assert "image" in described["required"]
    assert not {"strength", "mask", "guidance_scale"} & described["properties"].keys()


async def test_models_without_an_interface_keep_their_fields(
    tmp_path: Path, redis_url: str
) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s")
    async with running_api(settings, catalog=CATALOG) as running:
        schemas = (await running.http.get("/openapi.json")).json()["components"]["schemas"]
    assert {"clip_skip", "scheduler"} <= schemas["GenerationBody"]["properties"].keys()
    assert {"strength", "mask_blur"} <= schemas["EditForm"]["properties"].keys()


def test_the_order_of_tasks_and_fields_in_an_interface_makes_no_difference() -> None:
    interface = EDITOR.image.interface
    turned = interface.model_copy(
        update={"tasks": ("image", "text"), "schedulers": ("euler", "default")}
    )
    assert interface.difference(turned) == ""
    assert "tasks" in interface.difference(turned.model_copy(update={"tasks": ("text",)}))
    assert "pipeline" in interface.difference(turned.model_copy(update={"pipeline": "Other"}))
