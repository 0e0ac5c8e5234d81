"""Masks for edits and predictions, and variations, as clients send them and workers receive
them.
"""

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from api.inputs.codec_protocol import CodecError, MaskPrepared, PrepareMask
from api.inputs.codec_server import run_command
from api.openai.image_edits import VARIED_STRENGTH
from shared.models.blob import INLINE_LIMIT_BYTES, Blob
from shared.models.tasks.image import ImageInput
from tests.api.harness import IMAGE_MODEL, ApiUnderTest, api_with_redis
from tests.api.predicting import WAIT
from tests.api.test_images import drawn, encoded

pytestmark = pytest.mark.anyio
BOX = (8, 16, 40, 48)
"""The region to redraw: left, top, right and bottom in pixels."""
SOURCE = encoded(Image.radial_gradient("L").resize((64, 64)).convert("RGB"))
api = api_with_redis(secret="s")


def hole(size: tuple[int, int] = (64, 64), corners: tuple[int, int, int, int] = BOX) -> bytes:
    """OpenAI's mask: transparent pixels are redrawn."""
    mask = Image.new("RGBA", size, (9, 9, 9, 255))
    mask.paste((9, 9, 9, 0), corners)
    return encoded(mask)


def white(size: tuple[int, int] = (64, 64), corners: tuple[int, int, int, int] = BOX) -> bytes:
    """Replicate's mask: white pixels are redrawn."""
    mask = Image.new("L", size)
    mask.paste(255, corners)
    return encoded(mask)


def uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def levels(blob: Blob | None) -> np.ndarray:
    assert blob is not None
    with Image.open(io.BytesIO(blob.data or b"")) as image:
        assert (image.format, image.mode) == ("PNG", "L")
        return np.asarray(image)


WHOLE_BOX = np.asarray(Image.open(io.BytesIO(white())))


async def test_what_is_transparent_in_a_form_is_drawn_anew(api: ApiUnderTest) -> None:
    await api.openai().images.edit(
        image=SOURCE, mask=hole(), prompt="a", extra_body={"seed": 1}, n=2
    )
    first, second = drawn(api)
    assert np.array_equal(levels(first.mask), WHOLE_BOX)
    assert first.mask == second.mask
    assert first.strength == 0.8
    keys = {item.cache_key for item in api.worker.items}
    await api.openai().images.edit(image=SOURCE, prompt="a", extra_body={"seed": 1})
    assert len(keys | {item.cache_key for item in api.worker.items}) == 3


async def test_mask_in_json_is_the_one_of_a_form(api: ApiUnderTest) -> None:
    await api.openai().images.edit(image=SOURCE, mask=hole(), prompt="a", extra_body={"seed": 1})
    body = {
        "prompt": "a",
        "images": [{"image_url": uri(SOURCE)}],
        "mask": {"image_url": uri(hole())},
        "seed": 1,
    }
    answer = await api.http.post("/v1/images/edits", json=body)
    assert (answer.status_code, answer.headers["x-penstock-cache"]) == (200, "hit")
    answer = await api.http.post("/v1/images/edits", json=body | {"mask": None, "mask_blur": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mask_blur")
    other = body | {"mask": {"image_url": "https://10.0.0.1/a.png"}}
    answer = await api.http.post("/v1/images/edits", json=other)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mask")


async def test_streamed_edit_has_its_mask(api: ApiUnderTest) -> None:
    body: dict[str, Any] = {
        "prompt": "a",
        "images": [{"image_url": uri(SOURCE)}],
        "mask": {"image_url": uri(hole())},
        "stream": True,
        "seed": 1,
    }
    for mask in (hole(), hole(corners=(0, 0, 8, 8))):
        body["mask"] = {"image_url": uri(mask)}
        headers = {"idempotency-key": "one"}
        async with api.http.stream(
            "POST", "/v1/images/edits", json=body, headers=headers
        ) as answer:
            await answer.aread()
            status = answer.status_code
        if mask == hole():
            assert status == 200
            assert np.array_equal(levels(drawn(api)[0].mask), WHOLE_BOX)
    assert status == 422, "another mask is another request"


async def test_mask_is_fitted_to_the_size_to_draw(api: ApiUnderTest) -> None:
    large = encoded(Image.radial_gradient("L").resize((256, 128)))
    mask = hole((256, 128), (64, 32, 130, 96))
    await api.openai().images.edit(image=large, mask=mask, prompt="a", size="64x32")
    expected = np.zeros((32, 64), int)
    expected[8:24, 16:32] = 255
    expected[8:24, 32] = 128  # half of this pixel is masked
    assert np.abs(levels(drawn(api)[0].mask).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("kind", ["data", "file"])
async def test_what_is_white_in_a_prediction_is_drawn_anew(api: ApiUnderTest, kind: str) -> None:
    mask = uri(white())
    if kind == "file":
        files = {"content": ("a.png", white(), "image/png")}
        mask = (await api.http.post("/v1/files", files=files)).json()["urls"]["get"]
    wish = {"prompt": "a", "image": uri(SOURCE), "mask": mask, "seed": 1, "strength": 0.7}
    body = {"version": IMAGE_MODEL.name, "input": wish}
    made = (await api.http.post("/v1/predictions", json=body, headers=WAIT)).json()
    assert made["status"] == "succeeded"
    assert np.array_equal(levels(drawn(api)[0].mask), WHOLE_BOX)
    assert drawn(api)[0].strength == 0.7
    assert made["input"]["mask"].startswith(f"{api.url}/v1/files/file_")
    file = (await api.http.get(made["input"]["mask"])).json()
    assert (await api.http.get(file["urls"]["download"])).content == white()


@pytest.mark.parametrize(
    ("wish", "field", "reason"),
    [
        ({"mask": uri(white())}, "mask", "send the image to be masked"),
        ({"image": uri(SOURCE), "mask_blur": 2.0}, "mask_blur", "requires mask"),
        ({"image": uri(SOURCE), "mask": uri(white((32, 32)))}, "mask", "the image is 64x64"),
        ({"image": uri(SOURCE), "mask": uri(hole(corners=(0, 0, 1, 1)))}, "", ""),
        (
            {"image": uri(SOURCE), "mask": uri(white(corners=(0, 0, 0, 0)))},
            "mask",
            "it has no white pixels",
        ),
        ({"image": uri(SOURCE), "mask": "a.png"}, "mask", "must be a data: URI"),
        ({"image": uri(SOURCE), "mask": "https://10.0.0.1/a"}, "mask", "other URLs"),
        ({"image": uri(SOURCE), "mask": uri(white()), "mask_blur": -1.0}, "mask_blur", "greater"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_mask_of_a_prediction_is_refused_by_name(
    api: ApiUnderTest, wish: dict[str, Any], field: str, reason: str
) -> None:
    body = {"version": IMAGE_MODEL.name, "input": {"prompt": "a"} | wish}
    answer = await api.http.post("/v1/predictions", json=body, headers=WAIT)
    if not field:
        assert answer.status_code == 201
        return
    assert answer.status_code == 422, answer.text
    assert [one["field"] for one in answer.json()["invalid_fields"]] == [f"input.{field}"]
    assert reason in answer.text


async def test_large_mask_travels_through_the_object_store(api: ApiUnderTest) -> None:
    noise = Image.effect_noise((512, 512), 100)
    mask = noise.convert("RGBA")
    mask.putalpha(noise)
    await api.openai().images.edit(
        image=encoded(noise), mask=encoded(mask), prompt="b", size="512x512"
    )
    blob = drawn(api)[0].mask
    assert blob is not None
    assert blob.object_key is not None
    stored = await api.dependencies.objects.get(blob.object_key, 10_000_000)
    assert len(stored) > INLINE_LIMIT_BYTES
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored))), 255 - np.asarray(noise))


def prepared(data: bytes, redraws: Any, blur: float = 0.0, turn: int = 1) -> np.ndarray:
    size = (64, 64) if turn == 1 else (32, 64)
    command = PrepareMask(size, size, redraws, blur)
    costs: list[int] = []
    answer, png = run_command(command, data, costs.append)
    assert isinstance(answer, MaskPrepared), answer
    assert len(costs) == 1
    return levels(Blob("image/png", png))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "I;16", "CMYK"])
def test_every_kind_of_image_masks_by_its_white(mode: str) -> None:
    image: Image.Image = Image.open(io.BytesIO(white()))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    kind = "tiff" if mode == "CMYK" else "png"
    assert np.array_equal(prepared(encoded(image.convert(mode), kind), "white"), WHOLE_BOX)


@pytest.mark.parametrize("mode", ["LA", "P", "RGBA", "L"])
def test_every_kind_of_transparency_masks(mode: str) -> None:
    if mode == "L":  # one of its gray levels is transparent
        data = encoded(Image.open(io.BytesIO(white())), transparency=255)
    else:
        mask: Image.Image = Image.open(io.BytesIO(hole()))
        data = encoded(mask.quantize() if mode == "P" else mask.convert(mode))
    assert np.array_equal(prepared(data, "transparent"), WHOLE_BOX)


def test_mask_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # displayed rotated 90 degrees clockwise
    lying = Image.new("L", (64, 32))
    lying.paste(255, (0, 0, 16, 32))
    upright = prepared(encoded(lying, exif=exif), "white", turn=6)
    assert upright.shape == (64, 32)
    assert upright[:16].min() == 255
    assert upright[16:].max() == 0


def test_blur_softens_the_edge_inwards() -> None:
    sharp, soft = prepared(white(), "white"), prepared(white(), "white", blur=3.0)
    assert soft[sharp == 0].max() == 0
    across = soft[32, BOX[0] : 24].astype(int)
    assert across[0] < 64
    assert (np.diff(across) >= 0).all()
    assert across[8] == 255
    assert soft[32, 24] == 255


def source_of(given: ImageInput) -> np.ndarray:
    assert given.image is not None
    with Image.open(io.BytesIO(given.image.data or b"")) as image:
        return np.asarray(image)


async def test_padding_is_filled_from_the_edge_and_masked(api: ApiUnderTest) -> None:
    wish = {"prompt": "a", "image": uri(SOURCE), "padding": [8, 16, 24, 0], "seed": 1}
    body = {"version": IMAGE_MODEL.name, "input": wish}
    made = await api.http.post("/v1/predictions", json=body, headers=WAIT)
    assert made.json()["status"] == "succeeded", made.text
    (given,) = drawn(api)
    assert (given.width, given.height, given.strength) == (96, 80, 0.8)
    source, inner = source_of(given), np.asarray(Image.open(io.BytesIO(SOURCE)))
    assert np.array_equal(source[16:, 8:72], inner)
    assert (source[16:, :8] == inner[:, :1]).all()
    assert (source[16:, 72:] == inner[:, -1:]).all()
    assert (source[:16] == source[16:17]).all()
    mask = levels(given.mask)
    assert mask[16:, 8:72].max() == 0
    assert mask[:16].min() == mask[:, :8].min() == mask[:, 72:].min() == 255


async def test_padding_is_a_part_of_the_size_and_adds_to_a_mask(api: ApiUnderTest) -> None:
    wish: dict[str, Any] = {"prompt": "a", "image": uri(SOURCE), "mask": uri(white()), "seed": 1}
    wish |= {"padding": 16, "size": "96x96", "mask_blur": 1.0}
    body = {"version": IMAGE_MODEL.name, "input": wish}
    made = await api.http.post("/v1/predictions", json=body, headers=WAIT)
    assert made.json()["status"] == "succeeded", made.text
    (given,) = drawn(api)
    assert (given.width, given.height) == (96, 96)
    mask = levels(given.mask)
    assert mask[16:80, 16:80][WHOLE_BOX == 0].max() == 0
    assert mask[48, 40] == mask[2, 2] == 255
    assert mask[48, 15] < 255, "the inner edge of the padding is soft"


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"padding": 4}, ""),
        ({"padding": 3}, "multiples of 8"),
        ({"padding": 0}, "at least one nonzero side"),
        ({"padding": [8, 8]}, "at least 4 items"),
        ({"padding": "all"}, "should be a list"),
        ({"padding": 4097}, "less than or equal to 4096"),
        ({"padding": 4096}, "8256x8256 pixels"),
        ({"padding": 32, "size": "64x64"}, "leaves no room for the image in 64x64"),
        ({"padding": 8, "image": None}, "send the image"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_padding_is_refused_by_name(
    api: ApiUnderTest, wish: dict[str, Any], reason: str
) -> None:
    body = {
        "version": IMAGE_MODEL.name,
        "input": {"prompt": "a", "image": uri(SOURCE)} | wish,
    }
    answer = await api.http.post("/v1/predictions", json=body, headers=WAIT)
    if not reason:
        assert answer.status_code == 201, answer.text
        return
    assert answer.status_code == 422, answer.text
    assert answer.json()["invalid_fields"][0]["field"].startswith("input.padding")
    assert reason in answer.text


def test_more_pixels_than_a_source_may_have_are_refused_by_the_header_alone() -> None:
    def never(cost_bytes: int) -> None:
        raise AssertionError("nothing is to be decoded")

    command = PrepareMask((64, 64), (64, 64), "white", 0.0)
    answer, _ = run_command(command, encoded(Image.new("1", (6000, 5000))), never)
    assert isinstance(answer, CodecError)
    assert answer.code == "input_too_large"


# OpenAI no longer has a dedicated model for variations.
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
async def test_variation_is_image_to_image_without_a_prompt(api: ApiUnderTest) -> None:
    reply = await api.openai().images.create_variation(
        image=SOURCE, n=2, size="64x64", response_format="b64_json", extra_body={"seed": 3}
    )
    assert len(reply.data or []) == 2
    first, second = drawn(api)
    assert (first.prompt, first.strength, first.seed, second.seed) == ("", VARIED_STRENGTH, 3, 4)
    assert first.guidance_scale == 1, "equal prompts need no second pass"
    assert first.image is not None
    assert isinstance(first, ImageInput)
    assert first.mask is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": "a"}, "prompt"),
        ({"strength": "2"}, "strength"),
        ({"size": "63x64"}, "size"),
        ({"mask": "a"}, "mask"),
        ({"n": "11"}, "n"),
    ],
    ids=str,
)
async def test_variation_refuses_by_name(
    api: ApiUnderTest, fields: dict[str, str], field: str
) -> None:
    answer = await api.http.post("/v1/images/variations", files={"image": SOURCE}, data=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


async def test_variation_needs_an_image(api: ApiUnderTest) -> None:
    for sent in ({"json": {"image": "a"}}, {"data": {"n": "1"}}, {"files": {"mask": SOURCE}}):
        answer = await api.http.post("/v1/images/variations", **sent)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image")
