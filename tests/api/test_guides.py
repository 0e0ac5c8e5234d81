"""Behavior shared by requests with ControlNets and requests with IP-Adapters."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from api.openai.images import GenerationsEndpoint
from shared.errors import BadInput
from shared.models.blob import Blob
from shared.models.catalog import Catalog, Model
from tests.api.batches.batching import answers, batching, created, jsonl, until
from tests.api.harness import CATALOG, IMAGE_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import WAIT
from tests.api.test_controls import CONTROLLED, control_of, pixels, uri
from tests.api.test_images import drawn
from tests.api.test_ip_adapters import (
    PICTURE,
    SOURCE,
    WITH_IP_ADAPTERS,
    ip_adapter_of,
)

pytestmark = pytest.mark.anyio
BODIES = ("GenerationBody", "EditForm", "EditBody", "VariationForm")


@dataclass(frozen=True)
class Guide:
    """A kind of guide.

    `field` is one of `names`, and the names of its other fields start with it.
    """

    field: str
    model: Model
    names: tuple[str, ...]

    @property
    def wish(self) -> dict[str, str]:
        return {self.field: self.names[-1], f"{self.field}_image": uri(PICTURE)}

    def images(self, api: ApiUnderTest) -> list[Blob]:
        """The reference images that a worker received."""
        if self.field == "control":
            return [control_of(one).image for one in drawn(api)]
        return [ip_adapter_of(one).image for one in drawn(api)]


@pytest.fixture(
    params=[
        Guide("control", CONTROLLED, ("canny", "depth")),
        Guide("ip_adapter", WITH_IP_ADAPTERS, ("face", "style")),
    ],
    ids=lambda guide: guide.field,
)
def guide(request: pytest.FixtureRequest) -> Guide:
    chosen: Guide = request.param
    return chosen


async def test_model_without_any_takes_none_and_shows_none(
    guide: Guide, tmp_path: Path, redis_url: str
) -> None:
    catalog = Catalog((guide.model, *CATALOG.models))
    async with running_api(settings_for(tmp_path, redis_url=redis_url), catalog=catalog) as api:
        body = {"version": IMAGE_MODEL.name, "input": guide.wish | {"prompt": "a"}}
        answer = await api.http.post("/v1/predictions", json=body, headers=WAIT)
        assert answer.status_code == 422
        assert [one["field"] for one in answer.json()["invalid_fields"]] == [f"input.{guide.field}"]
        assert "omit it" in answer.text
        fields = {}
        for name in (IMAGE_MODEL.name, guide.model.name):
            made = (await api.http.get(f"/v1/models/penstock/{name}/versions")).json()["results"]
            schemas = made[0]["openapi_schema"]["components"]["schemas"]
            fields[name] = schemas["Input"]["properties"]
        document = (await api.http.get("/openapi.json")).json()["components"]["schemas"]
    assert not any(name.startswith(guide.field) for name in fields[IMAGE_MODEL.name])
    assert fields[guide.model.name][guide.field]["anyOf"][0]["enum"] == list(guide.names)
    assert f"{guide.field}_image" in document["GenerationBody"]["properties"]
    assert document["EditForm"]["properties"][guide.field]["enum"] == list(guide.names)


async def test_catalog_without_any_documents_none(
    guide: Guide, tmp_path: Path, redis_url: str
) -> None:
    async with running_api(settings_for(tmp_path, redis_url=redis_url)) as api:
        document = (await api.http.get("/openapi.json")).json()["components"]["schemas"]
    for name in BODIES:
        assert not any(field.startswith(guide.field) for field in document[name]["properties"])


async def test_lines_of_batches_have_guides(guide: Guide, tmp_path: Path, redis_url: str) -> None:
    """If one line has a broken image, only that line fails."""
    wish = {"model": guide.model.name, "prompt": "a", "seed": 1, guide.field: guide.names[0]}
    images = {"a": uri(PICTURE), "b": uri(b"no image"), "c": uri(SOURCE)}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/images/generations",
            "body": wish | {f"{guide.field}_image": image},
        }
        for name, image in images.items()
    ]
    async with batching(tmp_path, redis_url, catalog=Catalog((guide.model,))) as (api, _):
        client = api.openai()
        batch = await created(client, jsonl(lines), "/v1/images/generations")
        done = await until(client, batch)
        right = [one["custom_id"] for one in await answers(client, done.output_file_id)]
        assert right == ["a", "c"]
        (error,) = await answers(client, done.error_file_id)
        assert error["response"]["body"]["error"]["param"] == f"{guide.field}_image"
        sizes = {(one.height, one.width, 3) for one in drawn(api)}
        shapes = {pixels(image.data).shape for image in guide.images(api)}
    # The control image determines the output size.
    assert shapes == (sizes if guide.field == "control" else {(71, 130, 3), (64, 64, 3)})
    assert len(shapes) == 2


def test_line_of_a_batch_names_a_guide_of_its_model(guide: Guide) -> None:
    fields = {"model": guide.model.name, "prompt": "a", guide.field: "none"}
    line = fields | {f"{guide.field}_image": "file_a"}
    with pytest.raises(BadInput) as caught:
        GenerationsEndpoint().read(json.dumps(line).encode(), Catalog((guide.model,)), 1)
    assert caught.value.field == guide.field
