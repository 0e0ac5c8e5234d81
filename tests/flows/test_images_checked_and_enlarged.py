"""Requests for images that are checked and enlarged before they are delivered."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from PIL import Image

from api.batch_runner.runner import open_runner
from shared.models.after_image import WITHHELD
from shared.models.blob import Blob
from shared.models.catalog import Model
from shared.settings import ApiSettings, read_settings
from shared.tenants.plan import Limits, Plan
from shared.usage.row import Row
from shared.usage.row_list import RowList
from tests.api.batches.batching import answers, created, jsonl, until
from tests.api.harness import already_open
from tests.flows.models import Compute, catalog_of, class_entry
from tests.flows.test_lines_of_flows import client_of
from tests.flows.world import World, world
from tests.keys import bearer, keys_url, stored
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio

FILE, NUMBER = {"type": "string", "format": "uri"}, {"type": "number"}
CHECKED = {"nsfw": NUMBER, "is_safe": {"type": "boolean"}}
JUDGE = class_entry(
    "judge-image",
    {"image": FILE, "threshold": NUMBER},
    {"type": "object", "properties": CHECKED},
    deterministic=True,
    price={"per_item_usd": 0.25},
)
ENLARGE = class_entry(
    "enlarge-image",
    {"image": FILE, "scale": NUMBER},
    FILE,
    deterministic=True,
    price={"per_item_usd": 0.5},
)
DRAW_USD = 2.0
SIDE_PX, STEPS = 16, 4


def draws(name: str, **image: Any) -> Model:
    """A catalog entry for an image model."""
    return Model.model_validate(
        {
            "name": name,
            "task": "image",
            "source": "local:nowhere",
            "batch": {"max_pixel_steps": 10**7},
            "image": {"width": SIDE_PX, "height": SIDE_PX, "steps": STEPS} | image,
            "price": {"per_item_usd": DRAW_USD},
        }
    )


SAFETY = {"safety": {"model": JUDGE.name, "threshold": 0.5}}
UPSCALE = {"upscale": {"model": ENLARGE.name}}
BOTH, ONLY_LARGE, PLAIN = (
    draws("draw-both", **SAFETY, **UPSCALE),
    draws("draw-large", **UPSCALE),
    draws("draw-plain"),
)
WITH_ALL = draws(
    "draw-with-all",
    **SAFETY,
    **UPSCALE,
    controls={"depth": {"source": "local:nowhere"}},
    adapters={"ink": {"source": "local:ink.safetensors"}},
)
UNSAFE_FROM = 128
"""The redder an image, the less safe it is; the higher its seed, the redder it is."""
BLOCKED = "moderation_blocked: the image was drawn and then withheld by the safety check"


class Draws(Compute):
    """Single-color images whose color depends on their seed."""

    def output(self, name: str, values: Mapping[str, Any]) -> Any:
        self.asked.append((name, values))
        if name.startswith("draw"):
            self.began.add(values["prompt"])
            if values["prompt"] in self.gates:
                assert self.gates[values["prompt"]].wait(WAIT_LIMIT_S)
            return png((values["width"], values["height"]), values["seed"])
        with Image.open(io.BytesIO(values["image"])) as image:
            if name == ENLARGE.name:
                side = round(image.width * values["scale"])
                return Blob("image/png", png((side, side), red_of(image)))
            nsfw = red_of(image) / 255
            return {"nsfw": nsfw, "is_safe": nsfw < values["threshold"]}


def red_of(image: Image.Image) -> int:
    """The red value of a single-color image."""
    return image.convert("RGB").tobytes()[0]


def png(size: tuple[int, int], red: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (red % 256, 0, 0)).save(buffer, "png")
    return buffer.getvalue()


@pytest.fixture
async def images(tmp_path: Path, redis_url: str) -> AsyncIterator[World]:
    keys = keys_url(tmp_path, one="acme", two="brick")
    models = (BOTH, ONLY_LARGE, PLAIN, WITH_ALL, JUDGE, ENLARGE)
    async with world(redis_url, models=models, computes=Draws, keys_url=keys) as running:
        yield running


async def drawn(
    images: World, path: str = "generations", key: str = "one", **fields: Any
) -> httpx.Response:
    body = {"model": BOTH.name, "prompt": "a circle"} | fields
    return await images.http.post(f"/v1/images/{path}", json=body, headers=bearer(key))


def sizes_and_reds(answer: httpx.Response) -> list[tuple[tuple[int, int], int]]:
    assert answer.status_code == 200, answer.text
    seen = []
    for one in answer.json()["data"]:
        with Image.open(io.BytesIO(base64.b64decode(one["b64_json"]))) as image:
            seen.append((image.size, red_of(image)))
    return seen


def of_request(rows: list[Row], answer: httpx.Response) -> list[Row]:
    record = answer.headers["location"].rpartition("/")[2]
    return [row for row in rows if row.request_id == record]


def withheld(name: str) -> float:
    return float(WITHHELD.labels(name)._value.get())


async def test_a_safe_image_is_enlarged(images: World) -> None:
    answer = await drawn(images, seed=7, upscale=4)
    assert sizes_and_reds(answer) == [((64, 64), 7)]
    assert answer.json()["size"] == "64x64"
    assert answer.headers["x-penstock-seed"] == "7"
    assert "x-penstock-withheld" not in answer.headers
    rows = of_request(await images.until_rows(3), answer)
    assert [(row.step, row.model, row.status) for row in rows] == [
        ("image", BOTH.name, "succeeded"),
        ("safety", JUDGE.name, "succeeded"),
        ("upscale", ENLARGE.name, "succeeded"),
    ]
    cost = float(answer.headers["x-penstock-cost-usd"])
    assert cost == sum(row.cost_usd or 0 for row in rows) == DRAW_USD + 0.75


async def test_without_upscale_the_image_is_as_drawn_and_checked(images: World) -> None:
    answer = await drawn(images, seed=7)
    assert sizes_and_reds(answer) == [((16, 16), 7)]
    assert images.compute.count(ENLARGE.name) == 0
    ((_, judged),) = [one for one in images.compute.asked if one[0] == JUDGE.name]
    assert judged["threshold"] == 0.5


async def test_a_flagged_image_is_withheld_by_name_charged_and_counted(images: World) -> None:
    before = withheld(BOTH.name)
    answer = await drawn(images, seed=UNSAFE_FROM, upscale=2)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")
    assert answer.json()["error"] == {
        "message": BLOCKED,
        "type": "image_generation_user_error",
        "param": None,
        "code": "moderation_blocked",
    }
    rows = of_request(await images.until_rows(2), answer)
    # Drawing and checking are charged because that work was done. No image was enlarged.
    assert [(row.step, row.status) for row in rows] == [
        ("image", "succeeded"),
        ("safety", "succeeded"),
    ]
    cost = float(answer.headers["x-penstock-cost-usd"])
    assert cost == sum(row.cost_usd or 0 for row in rows) == DRAW_USD + 0.25
    assert images.compute.count(ENLARGE.name) == 0
    assert withheld(BOTH.name) == before + 1


async def test_each_of_several_images_is_judged_alone(images: World) -> None:
    before = withheld(BOTH.name)
    answer = await drawn(images, seed=UNSAFE_FROM - 2, n=4, upscale=2)
    assert sizes_and_reds(answer) == [((32, 32), UNSAFE_FROM - 2), ((32, 32), UNSAFE_FROM - 1)]
    assert answer.headers["x-penstock-withheld"] == "2"
    assert answer.headers["x-penstock-seed"] == f"{UNSAFE_FROM - 2},{UNSAFE_FROM - 1}"
    assert withheld(BOTH.name) == before + 2
    rows = of_request(await images.until_rows(10), answer)
    cost = float(answer.headers["x-penstock-cost-usd"])
    assert cost == sum(row.cost_usd or 0 for row in rows) == 4 * (DRAW_USD + 0.25) + 2 * 0.5
    assert withheld(BOTH.name) == before + 2


async def test_what_the_cache_has_is_checked_too(images: World) -> None:
    for _ in range(2):
        refused = await drawn(images, seed=UNSAFE_FROM)
        assert refused.status_code == 400
    assert images.compute.count(BOTH.name) == 1, "a hit"
    assert images.compute.count(JUDGE.name) == 1, "a hit too"
    assert refused.headers["x-penstock-cache"] == "hit"
    assert refused.headers["x-penstock-cost-usd"] == "0"


async def test_an_image_from_the_cache_of_before_is_checked_by_the_entry_of_now(
    tmp_path: Path, redis_url: str
) -> None:
    plain, checked = draws("draw-it"), draws("draw-it", **SAFETY)
    keys = keys_url(tmp_path, one="acme")
    body = {"model": "draw-it", "prompt": "a circle", "seed": UNSAFE_FROM}
    async with world(redis_url, models=(plain,), computes=Draws, keys_url=keys) as before:
        answer = await before.http.post("/v1/images/generations", json=body, headers=bearer("one"))
        assert answer.status_code == 200, answer.text
        with redis.Redis.from_url(redis_url) as kept:
            async with asyncio.timeout(WAIT_LIMIT_S):
                while not kept.keys("*:result:*"):  # noqa: ASYNC110 - the worker keeps it at last
                    await asyncio.sleep(0.02)
    async with world(redis_url, models=(checked, JUDGE), computes=Draws, keys_url=keys) as now:
        other = body | {"seed": 1}  # until it is connected, the cache is empty
        assert (
            await now.http.post("/v1/images/generations", json=other, headers=bearer("one"))
        ).is_success
        answer = await now.http.post("/v1/images/generations", json=body, headers=bearer("one"))
        assert answer.json()["error"]["code"] == "moderation_blocked"
        assert now.compute.count("draw-it") == 1, "the flagged one was a hit"


async def test_what_is_not_repeatable_is_not_kept(images: World) -> None:
    for _ in range(2):
        assert (await drawn(images, key="one", model=ONLY_LARGE.name, upscale=2)).is_success
    assert images.compute.count(ONLY_LARGE.name) == 2
    assert len({values["seed"] for name, values in images.compute.asked if "seed" in values}) == 2


async def test_only_large_requests_of_a_model_without_a_check_are_flows(images: World) -> None:
    plain = await drawn(images, model=ONLY_LARGE.name, seed=255)
    assert sizes_and_reds(plain) == [((16, 16), 255)]
    assert "location" not in plain.headers
    large = await drawn(images, model=ONLY_LARGE.name, seed=255, upscale=2)
    assert sizes_and_reds(large) == [((32, 32), 255)]
    assert images.compute.count(ONLY_LARGE.name) == 1, "the image itself was a hit"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"upscale": 3}, "upscale: Input should be 2 or 4"),
        ({"upscale": "2"}, "upscale: Input should be a valid integer"),
        (
            {"upscale": 2, "model": PLAIN.name},
            f"upscale: is not supported by {PLAIN.name}; omit it",
        ),
    ],
)
async def test_a_wrong_upscale_is_refused(
    images: World, fields: Mapping[str, Any], reason: str
) -> None:
    answer = await drawn(images, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["param"]) == (400, reason, "upscale")


async def test_edits_and_variations_do_the_same(images: World) -> None:
    source = {"image": ("a.png", png((32, 32), 9), "image/png")}
    for path, fields in (("edits", {"prompt": "a circle"}), ("variations", {})):
        form = {"model": BOTH.name, "seed": "7", "upscale": "2", **fields}
        for seed, status in (("7", 200), (str(UNSAFE_FROM), 400)):
            answer = await images.http.post(
                f"/v1/images/{path}",
                data=form | {"seed": seed},
                files=source,
                headers=bearer("one"),
            )
            assert answer.status_code == status, answer.text
            if status == 200:
                assert sizes_and_reds(answer) == [((32, 32), 7)]
    sources = [values["source"] for name, values in images.compute.asked if name == BOTH.name]
    assert [len(one) for one in sources] == [SIDE_PX * SIDE_PX * 3] * 4


async def predicted(images: World, model: Model, **given: Any) -> dict[str, Any]:
    return await images.run(model.name, {"prompt": "a circle"} | given, headers=bearer("one"))


async def test_predictions_show_the_image_model_and_its_images(images: World) -> None:
    plain = await predicted(images, ONLY_LARGE, seed=7)
    shown = await predicted(images, ONLY_LARGE, seed=7, upscale=2, num_outputs=2)
    assert shown["status"] == "succeeded", shown
    assert (shown["model"], shown["version"]) == (plain["model"], plain["version"])
    assert shown["input"]["upscale"] == 2
    reds = []
    for uri in shown["output"]:
        with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as image:
            reds.append((image.size, red_of(image)))
    assert reds == [((32, 32), 7), ((32, 32), 8)]
    steps = shown["metrics"]["steps"]
    assert [(one["id"], one["items"]) for one in steps] == [("image", 2), ("upscale", 2)]
    # The first image was in the cache, which costs nothing here.
    assert shown["metrics"]["cost_usd"] == DRAW_USD + 2 * 0.5


async def test_other_formats_are_links_to_each_image(images: World) -> None:
    shown = await predicted(images, BOTH, seed=127, num_outputs=3, output_format="webp")
    assert shown["metrics"]["withheld"] == 2
    (url,) = shown["output"]
    answer = await images.http.get(url)
    assert answer.headers["content-type"] == "image/webp"
    with Image.open(io.BytesIO(answer.content)) as image:
        assert (image.format, image.size) == ("WEBP", (16, 16))
        assert abs(red_of(image) - 127) < 8


async def events_of(images: World, shown: Mapping[str, Any]) -> list[tuple[str, str]]:
    answer = await images.http.get(shown["urls"]["stream"], headers=bearer("one"))
    events = [event for event in answer.text.split("\n\n") if event and not event.startswith(":")]
    fields = [dict(line.split(": ", 1) for line in event.splitlines()) for event in events]
    return [(one["event"], one["data"]) for one in fields]


async def test_a_flagged_prediction_fails_by_name_and_shows_its_image_nowhere(
    images: World,
) -> None:
    shown = await predicted(images, BOTH, seed=UNSAFE_FROM)
    assert (shown["status"], shown["output"], shown["error"]) == ("failed", None, BLOCKED)
    assert shown["metrics"]["cost_usd"] == DRAW_USD + 0.25
    events = await events_of(images, shown)
    assert [event for event in events if event[0] != "logs"] == [
        ("error", json.dumps({"detail": BLOCKED}, separators=(",", ":"))),
        ("done", '{"reason":"error"}'),
    ]


async def test_streams_of_predictions_have_the_images_alone(images: World) -> None:
    shown = await predicted(images, BOTH, seed=UNSAFE_FROM - 1, num_outputs=2)
    events = [(kind, data) for kind, data in await events_of(images, shown) if kind != "logs"]
    assert events == [("output", shown["output"][0]), ("done", "{}")]


async def test_a_stream_has_each_image_that_is_safe(images: World) -> None:
    fields: dict[str, Any] = {"seed": UNSAFE_FROM - 1, "n": 2, "upscale": 2, "partial_images": 2}
    answer = await drawn(images, stream=True, **fields)
    ((kind, data),) = events_in(answer)
    event = json.loads(data)
    assert (kind, event["size"], event["index"]) == ("image_generation.completed", "32x32", 0)
    with Image.open(io.BytesIO(base64.b64decode(event["b64_json"]))) as image:
        assert (image.size, red_of(image)) == ((32, 32), UNSAFE_FROM - 1)


async def test_a_stream_of_a_flagged_image_is_an_error(images: World) -> None:
    answer = await drawn(images, stream=True, seed=UNSAFE_FROM)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "moderation_blocked")


def events_in(answer: httpx.Response) -> list[tuple[str, str]]:
    assert answer.status_code == 200, answer.text
    events = [event for event in answer.text.split("\n\n") if "event: " in event]
    fields = [dict(line.split(": ", 1) for line in event.splitlines()) for event in events]
    return [(one["event"], one["data"]) for one in fields]


async def test_an_idempotent_request_is_one_run(images: World) -> None:
    body = {"model": ONLY_LARGE.name, "prompt": "a", "upscale": 2}
    headers = bearer("one") | {"idempotency-key": "k1"}
    first, again = [
        await images.http.post("/v1/images/generations", json=body, headers=headers)
        for _ in range(2)
    ]
    assert first.status_code == 200, first.text
    assert first.json()["data"] == again.json()["data"]
    assert images.compute.count(ONLY_LARGE.name) == 1


async def test_limits_and_budgets_count_as_for_the_image_model(
    redis_url: str, tmp_path: Path
) -> None:
    most = 2 * SIDE_PX * SIDE_PX * STEPS
    # Room for two small images and their steps, but not for the largest image that an entry allows.
    limits = Limits(pixel_steps_per_min=most, budget_usd_per_month=2 * (DRAW_USD + 0.75))
    url = keys_url(
        tmp_path,
        plans={"usual": Plan()},
        tenants={"acme": "usual"},
        keys=[stored("one", "acme", models=(BOTH.name,), limits=limits)],
    )
    models = (BOTH, JUDGE, ENLARGE)
    async with world(redis_url, models=models, computes=Draws, keys_url=url) as images:
        async with asyncio.timeout(WAIT_LIMIT_S):
            while True:
                answer = await drawn(images, seed=1, n=2, upscale=2)
                if answer.status_code != 503:  # limits are checked within 0.1 s or not at all
                    break
                await asyncio.sleep(0.1)
        assert len(sizes_and_reds(answer)) == 2, "keys need the image model alone"
        assert answer.headers["x-ratelimit-remaining-pixel-steps"] == "0"
        refused = await drawn(images, seed=9)
        with redis.Redis.from_url(redis_url, decode_responses=True) as client:
            fields = [client.hgetall(key) for key in client.keys("penstock:limits:month:*usd")]
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert [float(one["used"]) for one in fields] == [2 * (DRAW_USD + 0.75)]


@pytest.mark.parametrize("model", [BOTH, ONLY_LARGE], ids=lambda model: model.name)
async def test_lines_of_batches_are_checked_and_enlarged(
    redis_url: str, tmp_path: Path, model: Model
) -> None:
    objects: Any = {"objects_url": f"file://{tmp_path}/objects", "secret": "s"}
    settings = read_settings(ApiSettings, redis_url=redis_url, **objects)
    path, body = "/v1/images/generations", {"model": model.name, "prompt": "a"}
    fields = {"large": {"seed": 7, "upscale": 2}, "as drawn": {"seed": 7}}
    if model is BOTH:
        fields["flagged"] = {"seed": UNSAFE_FROM}
    given = [
        {"custom_id": name, "method": "POST", "url": path, "body": body | more}
        for name, more in fields.items()
    ]
    models = (model, JUDGE, ENLARGE)
    async with (
        world(redis_url, models=models, computes=Draws, **objects) as images,
        open_runner(
            settings,
            catalog_of(models=models),
            already_open(images.broker),
            already_open(images.broker),
            RowList(),
            lease_s=1.0,
        ) as runner,
    ):
        client = client_of(images)
        running = asyncio.create_task(runner.run())
        try:
            done = await until(client, await created(client, jsonl(given), endpoint=path))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        answered = await answers(client, done.output_file_id)
        failed = await answers(client, done.error_file_id)
    bodies = {one["custom_id"]: one["response"]["body"] for one in answered}
    assert {name: one["size"] for name, one in bodies.items()} == {
        "large": "32x32",
        "as drawn": "16x16",
    }
    with Image.open(io.BytesIO(base64.b64decode(bodies["large"]["data"][0]["b64_json"]))) as image:
        assert (image.size, red_of(image)) == ((32, 32), 7)
    assert [
        (one["custom_id"], one["response"]["body"]["error"]["code"], one["response"]["status_code"])
        for one in failed
    ] == [("flagged", "moderation_blocked", 400)] * (model is BOTH)


@pytest.mark.parametrize(("model", "previews"), [(ONLY_LARGE, 1), (BOTH, 0)], ids=["large", "both"])
async def test_previews_come_only_of_what_nobody_checks(
    redis_url: str, model: Model, previews: int
) -> None:
    """This holds even if the stream would otherwise have previews."""
    models = (model, JUDGE, ENLARGE)
    async with (
        world(redis_url, models=models, computes=Draws) as images,
        RecordStores(redis_url) as stores,
    ):
        images.compute.gates["a"] = threading.Event()
        body = {"version": model.name, "input": {"prompt": "a", "seed": 7, "upscale": 2}}
        run = (await images.http.post("/v1/predictions", json=body)).json()
        await images.until_began("a")
        await stores.previews.watch(run["id"])
        await stores.previews.add(run["id"], 0, 3, 4, png((16, 16), 7))
        images.compute.gates["a"].set()
        await images.until_over(run["id"])
        answer = await images.http.get(f"{run['urls']['stream']}&events=preview")
    kinds = [kind for kind, _ in events_in(answer) if kind != "logs"]
    assert kinds == [*["preview"] * previews, "output", "done"]


async def test_a_drawing_keeps_its_control_and_its_adapter(images: World) -> None:
    shown = "data:image/png;base64," + base64.b64encode(png((SIDE_PX, SIDE_PX), 200)).decode()
    size = f"{SIDE_PX}x{SIDE_PX}"
    wish: dict[str, Any] = {"model": WITH_ALL.name, "seed": 7, "upscale": 4, "size": size}
    wish |= {"control": "depth", "control_image": shown, "controlnet_conditioning_scale": 0.5}
    answer = await drawn(images, **wish | {"lora_weights": "ink", "lora_scale": 0.25})
    assert sizes_and_reds(answer) == [((4 * SIDE_PX, 4 * SIDE_PX), 7)]
    ((_, values),) = [one for one in images.compute.asked if one[0] == WITH_ALL.name]
    (control,) = values["controls"]
    assert (control.name, control.scale) == ("depth", 0.5)
    assert control.map == bytes((200, 0, 0)) * SIDE_PX * SIDE_PX
    assert (values["adapter"], values["adapter_scale"]) == ("ink", 0.25)
    again = await drawn(images, **wish)
    assert again.headers["x-penstock-cache"] != "hit", "the adapter counts in the key"
