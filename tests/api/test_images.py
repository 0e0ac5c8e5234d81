"""POST /v1/images/…, as OpenAI's client sees it."""

import base64
import io

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from shared.errors import PenstockError
from shared.models.blob import INLINE_LIMIT_BYTES
from shared.models.tasks.image import ImageInput
from shared.stores.objects import LINK_VALID_S, UrlSigner
from tests.api.fake_worker import MAX_PROMPT_WORDS, png_of
from tests.api.harness import IMAGE_MODEL, ApiUnderTest

pytestmark = pytest.mark.anyio
DEFAULTS = IMAGE_MODEL.image


def drawn(api: ApiUnderTest) -> list[ImageInput]:
    """Image inputs received by the worker, sorted by seed."""
    inputs = [item.input for item in api.worker.items if isinstance(item.input, ImageInput)]
    return sorted(inputs, key=lambda given: given.seed)


def source_of(given: ImageInput) -> Image.Image:
    """The source image that was sent with the job."""
    assert given.image is not None
    assert given.image.data is not None
    return Image.open(io.BytesIO(given.image.data))


def encoded(image: Image.Image, kind: str = "png", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


async def test_prompt_alone_is_enough(api: ApiUnderTest) -> None:
    reply = await api.openai().images.generate(prompt="a cat")
    (given,) = drawn(api)
    assert base64.b64decode(reply.data[0].b64_json) == png_of(given)
    assert (given.prompt, given.width, given.height) == ("a cat", DEFAULTS.width, DEFAULTS.height)
    assert (given.steps, given.guidance_scale) == (DEFAULTS.steps, DEFAULTS.guidance_scale)
    assert given.scheduler == DEFAULTS.scheduler
    assert (reply.size, reply.output_format) == ("64x64", "png")
    assert reply.created > 1_700_000_000


async def test_every_parameter_reaches_the_model(api: ApiUnderTest) -> None:
    extra = {
        "seed": 5,
        "num_inference_steps": 7,
        "guidance_scale": 3,
        "negative_prompt": "dogs",
        "scheduler": "euler_a",
        "clip_skip": 1,
        "guidance_rescale": 0.7,
    }
    await api.openai().images.generate(
        prompt="a cat",
        model=IMAGE_MODEL.name,
        size="72x128",
        quality="low",
        style="vivid",
        background="opaque",
        moderation="low",
        user="me",
        stream=False,
        extra_body=extra,
    )
    usual = ImageInput("a cat", 72, 128, 7, 3.0, 5, "euler_a", "dogs")
    assert drawn(api) == [msgspec.structs.replace(usual, clip_skip=1, guidance_rescale=0.7)]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("K_EULER_ANCESTRAL", "euler_a"),
        ("KarrasDPM", "dpmpp_2m_karras"),
        ("DPMSolverMultistepScheduler", "dpmpp_2m"),
        ("EulerDiscreteScheduler", "euler"),
    ],
)
async def test_names_of_replicate_and_diffusers_stand_for_the_short_ones(
    api: ApiUnderTest, name: str, short: str
) -> None:
    for scheduler in (name, short):
        await api.openai().images.generate(
            prompt="a cat", extra_body={"scheduler": scheduler, "seed": 1}
        )
    # The second comes from the cache.
    assert [given.scheduler for given in drawn(api)] == [short]


async def test_n_images_count_up_from_the_seed_one_job_each(api: ApiUnderTest) -> None:
    raw = await api.openai().images.with_raw_response.generate(
        prompt="a", n=3, extra_body={"seed": 40}
    )
    assert [given.seed for given in drawn(api)] == [40, 41, 42]
    assert len(api.worker.jobs) == 3
    assert raw.headers["x-penstock-seed"] == "40,41,42"
    images = [base64.b64decode(item.b64_json) for item in raw.parse().data]
    assert images == [png_of(given) for given in drawn(api)]
    assert all(item.cache_key for item in api.worker.items)


async def test_without_a_seed_nothing_is_kept(api: ApiUnderTest) -> None:
    await api.openai().images.generate(prompt="a")
    await api.openai().images.generate(prompt="a")
    assert [item.cache_key for item in api.worker.items] == [None, None]
    assert len({given.seed for given in drawn(api)}) == 2


@pytest.mark.parametrize(
    ("output_format", "kind"), [("jpeg", "JPEG"), ("webp", "WEBP"), ("png", "PNG")]
)
async def test_result_comes_in_the_format_asked_for(
    api: ApiUnderTest, output_format: str, kind: str
) -> None:
    reply = await api.openai().images.generate(
        prompt="a", output_format=output_format, extra_body={"seed": 200}
    )
    image = Image.open(io.BytesIO(base64.b64decode(reply.data[0].b64_json)))
    assert (image.format, image.size) == (kind, (64, 64))
    assert np.allclose(np.asarray(image.convert("RGB"))[30, 30], (200, 0, 20), atol=4)


async def test_quality_is_a_matter_of_size(api: ApiUnderTest) -> None:
    sizes = []
    for quality in (1, 100):
        body = {"prompt": "a", "seed": 77, "output_format": "jpeg", "output_compression": quality}
        reply = (await api.http.post("/v1/images/generations", json=body)).json()
        sizes.append(len(reply["data"][0]["b64_json"]))
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("output_format", "media_type"), [("png", "image/png"), ("webp", "image/webp")]
)
async def test_link_gives_the_image(api: ApiUnderTest, output_format: str, media_type: str) -> None:
    reply = await api.openai().images.generate(
        prompt="a", response_format="url", output_format=output_format, extra_body={"seed": 9}
    )
    assert reply.data[0].b64_json is None
    async with httpx.AsyncClient() as stranger:
        response = await stranger.get(reply.data[0].url)
    assert response.status_code == 200
    assert response.headers["content-type"] == media_type
    assert Image.open(io.BytesIO(response.content)).size == (64, 64)


@pytest.mark.parametrize("change", ["type", "expires", "signature", "key"])
async def test_changed_link_is_refused(api: ApiUnderTest, change: str) -> None:
    reply = await api.openai().images.generate(prompt="a", response_format="url")
    url = httpx.URL(reply.data[0].url)
    if change == "key":
        other = "1" if url.path[-5] == "0" else "0"
        changed = url.copy_with(path=f"{url.path[:-5]}{other}.png")
    else:
        changed = url.copy_merge_params({change: url.params[change] + "1"})
    response = await api.http.get(changed)
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "link_invalid"


async def test_link_without_signature_is_refused(api: ApiUnderTest) -> None:
    response = await api.http.get("/v1/objects/results/a.png")
    assert response.status_code == 400


def test_link_expires_after_an_hour() -> None:
    now_s = [1000.0]
    url_signer = UrlSigner("secret", clock=lambda: now_s[0])
    query = dict(httpx.URL(url_signer.path("a", "image/png")).params)
    now_s[0] += LINK_VALID_S - 1
    url_signer.check("a", query["type"], int(query["expires"]), query["signature"])
    now_s[0] += 1
    with pytest.raises(PenstockError, match="expired"):
        url_signer.check("a", query["type"], int(query["expires"]), query["signature"])


async def test_edit_sends_the_source_at_the_size_to_draw(api: ApiUnderTest) -> None:
    source = encoded(Image.new("RGB", (300, 200), (10, 20, 30)), "jpeg", quality=100)
    await api.openai().images.edit(
        image=source, prompt="b", size="96x64", extra_body={"strength": 0.5, "seed": 3}
    )
    (given,) = drawn(api)
    assert (given.width, given.height, given.strength, given.seed) == (96, 64, 0.5, 3)
    image = source_of(given)
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (96, 64))
    assert np.allclose(np.asarray(image)[5, 5], (10, 20, 30), atol=2)


async def test_edit_takes_one_image_in_a_list_and_one_in_json(api: ApiUnderTest) -> None:
    source = encoded(Image.new("RGB", (64, 64), "red"))
    await api.openai().images.edit(image=[source], prompt="b", n=2, extra_body={"seed": 1})
    url = "data:image/png;base64," + base64.b64encode(source).decode()
    body = {"prompt": "b", "images": [{"image_url": url}], "n": 2, "seed": 1}
    anew = {"cache-control": "no-cache"}
    assert (await api.http.post("/v1/images/edits", json=body, headers=anew)).status_code == 200
    keys = [item.cache_key for item in api.worker.items]
    assert len(keys) == 4
    assert len(set(keys)) == 2


@pytest.mark.parametrize(
    ("source", "drawn_size"),
    [((512, 512), (64, 64)), ((400, 100), (128, 32)), ((2, 2000), (8, 2024))],
)
async def test_edit_keeps_the_shape_of_the_source(
    api: ApiUnderTest, source: tuple[int, int], drawn_size: tuple[int, int]
) -> None:
    reply = await api.openai().images.edit(image=encoded(Image.new("L", source)), prompt="b")
    assert [(given.width, given.height) for given in drawn(api)] == [drawn_size]
    assert reply.size == f"{drawn_size[0]}x{drawn_size[1]}"


async def test_source_is_turned_upright_and_laid_on_white(api: ApiUnderTest) -> None:
    image = Image.new("RGBA", (64, 32), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 32, 32))
    exif = Image.Exif()
    exif[0x0112] = 6  # displayed rotated 90 degrees clockwise
    await api.openai().images.edit(image=encoded(image, exif=exif), prompt="b", size="32x64")
    upright = source_of(drawn(api)[0])
    assert upright.getpixel((16, 8)) == (255, 0, 0)
    assert upright.getpixel((16, 56)) == (255, 255, 255)


async def test_large_source_travels_through_the_object_store(api: ApiUnderTest) -> None:
    noise = Image.effect_noise((512, 512), 100)
    await api.openai().images.edit(image=encoded(noise), prompt="b", size="512x512")
    blob = drawn(api)[0].image
    assert blob is not None
    assert blob.data is None
    assert blob.object_key is not None
    stored = await api.dependencies.objects.get(blob.object_key, 10_000_000)
    assert len(stored) > INLINE_LIMIT_BYTES
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored)))[..., 0], np.asarray(noise))


@pytest.mark.parametrize("response_format", ["url", "b64_json"])
async def test_large_result_comes_from_the_object_store(
    api: ApiUnderTest, response_format: str
) -> None:
    api.worker.stores_results_in = api.dependencies.objects
    body = {"prompt": "a", "seed": 4, "response_format": response_format}
    item = (await api.http.post("/v1/images/generations", json=body)).json()["data"][0]
    data = (
        base64.b64decode(item["b64_json"])
        if "b64_json" in item
        else (await api.http.get(item["url"])).content
    )
    assert data == png_of(drawn(api)[0])


async def test_result_that_is_gone_from_the_store_is_not_found(api: ApiUnderTest) -> None:
    path = api.dependencies.url_signer.path("results/gone.png", "image/png")
    response = await api.http.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


LONG_PROMPT = "red " * (MAX_PROMPT_WORDS + 4)
LEFT_OUT = "x-penstock-truncated-tokens"


@pytest.mark.parametrize("wish", [{"n": 3}, {"n": 1}], ids=str)
async def test_what_a_prompt_lost_is_told(api: ApiUnderTest, wish: dict[str, int]) -> None:
    images = api.openai().images.with_raw_response
    answer = await images.generate(
        prompt=LONG_PROMPT, extra_body=wish | {"seed": 1, "negative_prompt": "a b"}
    )
    assert answer.headers[LEFT_OUT] == "6"
    again = await images.generate(
        prompt=LONG_PROMPT, extra_body=wish | {"seed": 1, "negative_prompt": "a b"}
    )
    assert (again.headers["x-penstock-cache"], again.headers[LEFT_OUT]) == ("hit", "6")
    assert (await images.generate(prompt="red")).headers[LEFT_OUT] == "0"
    edited = await images.edit(image=encoded(Image.new("RGB", (64, 64))), prompt=LONG_PROMPT)
    assert edited.headers[LEFT_OUT] == "4"
    for path in ("generations", "edits"):
        page = (await api.http.get("/openapi.json")).json()["paths"][f"/v1/images/{path}"]["post"]
        assert "X-Penstock-Truncated-Tokens" in page["responses"]["200"]["headers"]
