"""IP-Adapters in requests: what callers may send, and the input that workers receive."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shared.models.catalog import Catalog
from shared.models.image_entry import Control, IpAdapter
from shared.models.tasks.image import ImageInput, IpAdapterInput
from tests.api.harness import CATALOG, IMAGE_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import WAIT
from tests.api.test_controls import pixels, uri
from tests.api.test_images import drawn, encoded

pytestmark = pytest.mark.anyio
KNOWN = {
    "style": IpAdapter(source="local:a", weight_name="a.safetensors", scale=0.6),
    "face": IpAdapter(source="local:a", subfolder="models", weight_name="b.safetensors"),
}
WITH_IP_ADAPTERS = IMAGE_MODEL.model_copy(
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
    catalog = Catalog((WITH_IP_ADAPTERS, *CATALOG.models))
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s")
    async with running_api(settings, catalog=catalog) as running:
        yield running


def ip_adapter_of(given: ImageInput) -> IpAdapterInput:
    assert given.ip_adapter is not None
    return given.ip_adapter


async def predicted(api: ApiUnderTest, wish: dict[str, Any]) -> Any:
    body = {"version": WITH_IP_ADAPTERS.name, "input": {"prompt": "a", "seed": 1} | wish}
    return await api.http.post("/v1/predictions", json=body, headers=WAIT)


async def test_prediction_has_the_pixels_of_its_image_and_the_usual_size(
    api: ApiUnderTest,
) -> None:
    wish = {"ip_adapter": "style", "ip_adapter_image": uri(PICTURE)}
    made = await predicted(api, wish)
    assert made.json()["status"] == "succeeded", made.text
    (given,) = drawn(api)
    assert given.image is None
    assert (given.width, given.height) == (
        WITH_IP_ADAPTERS.image.width,
        WITH_IP_ADAPTERS.image.height,
    )
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
    await api.openai().images.generate(model=WITH_IP_ADAPTERS.name, prompt="a", extra_body=extra)
    assert ip_adapter_of(drawn(api)[0]).scale == 0.6
    await api.openai().images.edit(
        model=WITH_IP_ADAPTERS.name, image=SOURCE, prompt="a", extra_body=extra | {"seed": 2}
    )
    edited = drawn(api)[1]
    assert edited.image is not None
    assert np.array_equal(pixels(ip_adapter_of(edited).image.data), pixels(PICTURE))


@pytest.mark.parametrize("path", ["edits", "variations"])
async def test_image_may_be_a_file_of_a_form(api: ApiUnderTest, path: str) -> None:
    fields = {"model": WITH_IP_ADAPTERS.name, "ip_adapter": "face", "seed": "1"}
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
        "model": WITH_IP_ADAPTERS.name,
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
    ({"ip_adapter": "style"}, "ip_adapter_image", "is required for ip_adapter"),
    ({"ip_adapter_image": uri(PICTURE)}, "ip_adapter_image", "requires ip_adapter"),
    ({"ip_adapter_scale": 0.5}, "ip_adapter_scale", "requires ip_adapter"),
    (RIGHT | {"ip_adapter_image": uri(b"no image")}, "ip_adapter_image", "not a valid PNG"),
    (RIGHT | {"ip_adapter_image": "a.png"}, "ip_adapter_image", "must be a data: URI"),
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
    body: dict[str, Any] = {"model": WITH_IP_ADAPTERS.name, "prompt": "a"} | wish
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
