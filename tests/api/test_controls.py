"""ControlNets in requests: what callers may send, and the input that workers receive."""

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shared.models.catalog import Catalog
from shared.models.image_entry import Control
from shared.models.tasks.image import ControlInput, ImageInput
from tests.api.harness import CATALOG, IMAGE_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import WAIT
from tests.api.test_images import drawn, encoded

pytestmark = pytest.mark.anyio
CONTROLS = {
    "canny": Control(source="local:a", preprocessor="canny", scale=0.8),
    "depth": Control(source="local:b"),
}
CONTROLLED = IMAGE_MODEL.model_copy(
    update={
        "name": "with-controls",
        "aliases": (),
        "image": IMAGE_MODEL.image.model_copy(update={"controls": CONTROLS}),
    }
)
PICTURE = encoded(Image.radial_gradient("L").resize((128, 64)).convert("RGB"))
SOURCE = encoded(Image.linear_gradient("L").resize((64, 64)).convert("RGB"))
WHITE = encoded(Image.new("L", (64, 64), 255))


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    catalog = Catalog((CONTROLLED, *CATALOG.models))
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s")
    async with running_api(settings, catalog=catalog) as running:
        yield running


def uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def control_of(given: ImageInput) -> ControlInput:
    assert given.control is not None
    return given.control


def pixels(png: bytes | None) -> np.ndarray:
    with Image.open(io.BytesIO(png or b"")) as image:
        assert image.mode == "RGB"
        return np.asarray(image)


async def predicted(api: ApiUnderTest, wish: dict[str, Any]) -> Any:
    body = {"version": CONTROLLED.name, "input": {"prompt": "a", "seed": 1} | wish}
    return await api.http.post("/v1/predictions", json=body, headers=WAIT)


async def test_prediction_has_the_size_of_its_control_image(api: ApiUnderTest) -> None:
    wish = {"control": "canny", "control_image": uri(PICTURE)}
    made = await predicted(api, wish)
    assert made.json()["status"] == "succeeded", made.text
    (given,) = drawn(api)
    control = control_of(given)
    assert given.image is None
    assert (given.width, given.height) == (88, 40)
    assert pixels(control.image.data).shape == (given.height, given.width, 3)
    assert (control.name, control.digest) == ("canny", CONTROLS["canny"].version)
    assert (control.scale, control.start, control.end) == (0.8, 0.0, 1.0)
    shown = made.json()["input"]["control_image"]
    assert shown.startswith(f"{api.url}/v1/files/file_")
    file = (await api.http.get(shown)).json()
    assert (await api.http.get(file["urls"]["download"])).content == PICTURE


async def test_prediction_has_source_mask_and_control(api: ApiUnderTest) -> None:
    wish = {
        "image": uri(SOURCE),
        "mask": uri(WHITE),
        "control": "depth",
        "control_image": uri(PICTURE),
        "controlnet_conditioning_scale": 1.5,
        "control_guidance_start": 0.1,
        "control_guidance_end": 0.6,
        "num_outputs": 2,
    }
    made = await predicted(api, wish)
    assert made.json()["status"] == "succeeded", made.text
    first, second = drawn(api)
    assert (first.width, first.height) == (64, 64)
    assert first.mask is not None
    control = control_of(first)
    assert pixels(control.image.data).shape == (64, 64, 3)
    assert (control.scale, control.start, control.end) == (1.5, 0.1, 0.6)
    assert control_of(second) == control


async def test_control_image_may_be_a_file_of_this_api(api: ApiUnderTest) -> None:
    files = {"content": ("a.png", PICTURE, "image/png")}
    made = (await api.http.post("/v1/files", files=files)).json()
    wish = {"control": "depth", "control_image": made["urls"]["get"], "size": "64x64"}
    assert (await predicted(api, wish)).json()["status"] == "succeeded"
    assert pixels(control_of(drawn(api)[0]).image.data).shape == (64, 64, 3)


async def test_openais_clients_send_controls(api: ApiUnderTest) -> None:
    extra = {"control": "canny", "control_image": uri(PICTURE), "seed": 1}
    await api.openai().images.generate(model=CONTROLLED.name, prompt="a", extra_body=extra)
    (given,) = drawn(api)
    assert (given.width, given.height) == (88, 40)
    assert control_of(given).scale == 0.8
    await api.openai().images.edit(
        model=CONTROLLED.name, image=SOURCE, prompt="a", extra_body=extra | {"seed": 2}
    )
    edited = drawn(api)[1]
    assert edited.image is not None
    assert pixels(control_of(edited).image.data).shape == (edited.height, edited.width, 3)


@pytest.mark.parametrize("path", ["edits", "variations"])
async def test_control_image_may_be_a_file_of_a_form(api: ApiUnderTest, path: str) -> None:
    fields = {"model": CONTROLLED.name, "control": "depth", "seed": "1"}
    fields |= {} if path == "variations" else {"prompt": "a"}
    answer = await api.http.post(
        f"/v1/images/{path}", files={"image": SOURCE, "control_image": PICTURE}, data=fields
    )
    assert answer.status_code == 200, answer.text
    assert control_of(drawn(api)[0]).name == "depth"


async def test_edit_in_json_has_a_control_in_its_stream(api: ApiUnderTest) -> None:
    body = {
        "model": CONTROLLED.name,
        "prompt": "a",
        "images": [{"image_url": uri(SOURCE)}],
        "control": "depth",
        "control_image": uri(PICTURE),
        "stream": True,
    }
    answer = await api.http.post("/v1/images/edits", json=body)
    assert "image_edit.completed" in answer.text
    assert control_of(drawn(api)[0]).name == "depth"


WRONG = [
    ({"control": "pose", "control_image": uri(PICTURE)}, "control", "it has canny, depth"),
    ({"control": "canny"}, "control_image", "is required for control"),
    ({"control_image": uri(PICTURE)}, "control_image", "requires control"),
    (
        {"control": "canny", "control_image": uri(b"no image")},
        "control_image",
        "not a valid PNG",
    ),
    ({"control": "canny", "control_image": "a.png"}, "control_image", "must be a data: URI"),
    (
        {
            "control": "canny",
            "control_image": uri(PICTURE),
            "controlnet_conditioning_scale": 2.1,
        },
        "controlnet_conditioning_scale",
        "less than or equal to 2",
    ),
    ({"controlnet_conditioning_scale": 1.0}, "controlnet_conditioning_scale", "requires control"),
    (
        {
            "control": "canny",
            "control_image": uri(PICTURE),
            "control_guidance_start": 0.5,
            "control_guidance_end": 0.5,
        },
        "control_guidance_start",
        "must be less than control_guidance_end",
    ),
]


@pytest.mark.parametrize(("wish", "field", "reason"), WRONG, ids=lambda value: str(value)[:40])
async def test_wrong_controls_are_refused_by_name_at_all_doors(
    api: ApiUnderTest, wish: dict[str, Any], field: str, reason: str
) -> None:
    answer = await predicted(api, wish)
    assert answer.status_code == 422, answer.text
    assert [one["field"] for one in answer.json()["invalid_fields"]] == [f"input.{field}"]
    assert reason in answer.text
    body: dict[str, Any] = {"model": CONTROLLED.name, "prompt": "a"} | wish
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


async def test_several_controls_reach_the_worker(api: ApiUnderTest) -> None:
    """Each control has a separate image, scaled to the output's size."""
    more = {"control": "canny", "control_image": uri(SOURCE), "control_guidance_end": 0.5}
    wish = {"control": "depth", "control_image": uri(PICTURE), "more_controls": [more]}
    made = await predicted(api, wish)
    assert made.status_code == 201, made.text
    body = wish | {"model": CONTROLLED.name, "prompt": "a"}
    answer = await api.http.post("/v1/images/generations", json=body)
    assert answer.status_code == 200, answer.text
    for given in drawn(api):
        first, second = given.controls
        assert (first.name, first.scale, first.end) == ("depth", 1.0, 1.0)
        assert (second.name, second.scale, second.end) == ("canny", 0.8, 0.5)
        assert first.image != second.image
        assert pixels(second.image.data).shape == (given.height, given.width, 3)
    (recorded,) = made.json()["input"]["more_controls"]
    assert recorded["control_image"].startswith("http"), "a record holds no files"
    assert recorded | more == {**more, "control_image": uri(SOURCE)}


NAMED = {"control": "depth", "control_image": uri(PICTURE)}


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"more_controls": [NAMED]}, "set control first"),
        (NAMED | {"more_controls": [NAMED] * 4}, "at most 3"),
        (NAMED | {"more_controls": [{}]}, "more_controls[0].control: must name one"),
        (NAMED | {"more_controls": [{"control": "pose"}]}, "more_controls[0].control: "),
        (
            NAMED | {"more_controls": [NAMED, {"control": "canny"}]},
            "more_controls[1].control_image",
        ),
        (
            NAMED | {"more_controls": [NAMED | {"control_image": uri(b"no image")}]},
            "more_controls[0].control_image",
        ),
        (
            NAMED | {"more_controls": [NAMED | {"controlnet_conditioning_scale": 3}]},
            "more_controls[0].controlnet_conditioning_scale",
        ),
        (NAMED | {"more_controls": [NAMED | {"prompt": "a"}]}, "more_controls[0].prompt"),
    ],
    ids=range(8),
)
async def test_wrong_controls_among_several_are_refused_by_name(
    api: ApiUnderTest, wish: dict[str, Any], reason: str
) -> None:
    answer = await predicted(api, wish)
    assert answer.status_code == 422, answer.text
    (wrong,) = answer.json()["invalid_fields"]
    assert wrong["field"].startswith("input.more_controls"), answer.text
    body = wish | {"model": CONTROLLED.name, "prompt": "a"}
    refused = await api.http.post("/v1/images/generations", json=body)
    assert refused.status_code == 400, refused.text
    assert reason in refused.json()["error"]["message"], refused.text
    assert not drawn(api)


async def test_schemas_name_the_controls_of_more_controls(api: ApiUnderTest) -> None:
    document = (await api.http.get("/openapi.json")).json()["components"]["schemas"]
    field = document["GenerationBody"]["properties"]["more_controls"]
    own = field["anyOf"][0]["items"]["properties"]["control"]
    assert own["anyOf"][0]["enum"] == ["canny", "depth"]
    assert "more_controls" not in document["EditForm"]["properties"]


async def test_file_of_a_form_is_for_a_control(api: ApiUnderTest) -> None:
    answer = await api.http.post(
        "/v1/images/edits",
        files={"image": SOURCE, "control_image": PICTURE},
        data={"model": CONTROLLED.name, "prompt": "a"},
    )
    assert answer.json()["error"]["param"] == "control_image", answer.text
