"""Images through the whole pipeline, requested with the openai client: seeded, several at once,
redrawn.
"""

import base64
import io
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from openai.types import ImagesResponse
from PIL import Image

from models.shapes.draw import draw
from models.shapes.judge import DetectedShape, read
from models.shapes.world import DrawnShape, Scene
from tests.end_to_end.rows import Rows, eventually
from tests.limits import PATIENCE

pytestmark = pytest.mark.slow

MODEL = "stable-diffusion-tiny"


def pngs(answer: ImagesResponse) -> list[bytes]:
    """The PNG files in a response."""
    found = [base64.b64decode(item.b64_json or "") for item in answer.data or []]
    assert all(data.startswith(b"\x89PNG") for data in found)
    return found


def pixels(png: bytes) -> NDArray[np.int16]:
    """Every pixel's RGB values, [height, width, 3]."""
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"), np.int16)


def seen_in(png: bytes) -> list[DetectedShape]:
    """The shapes shown in an image."""
    return list(read(pixels(png).astype(np.uint8)).figures)


def test_images_show_what_was_asked_for(client: openai.OpenAI) -> None:
    """For six seeds each: a red circle, and one of these images redrawn with a blue circle in the
    same place.
    """
    asked: dict[str, Any] = {"model": MODEL, "n": 6, "size": "64x64", "extra_body": {"seed": 11}}
    drawn = pngs(client.images.generate(prompt="a large red circle on a white background", **asked))
    circles = [
        png
        for png in drawn
        if [(one.color, one.shape) for one in seen_in(png)] == [("red", "circle")]
    ]
    assert len(circles) >= 5
    (before,) = seen_in(circles[0])
    recolored = client.images.edit(
        model=MODEL,
        image=("circle.png", circles[0], "image/png"),
        prompt="a large blue circle on a white background",
        n=6,
        extra_body={"strength": 0.6, "seed": 11},
    )
    kept = [
        [
            (one.color, one.shape, abs(one.x - before.x) <= 6, abs(one.y - before.y) <= 6)
            for one in seen_in(png)
        ]
        for png in pngs(recolored)
    ]
    assert kept.count([("blue", "circle", True, True)]) >= 5, kept


def test_seed_gives_the_same_bytes_again(client: openai.OpenAI, rows: Rows, text: str) -> None:
    asking = client.images.with_raw_response
    headers: list[dict[str, str]] = [{}, {}, {"Cache-Control": "no-cache"}]
    answers = [
        asking.generate(
            model=MODEL, prompt=text, size="64x64", extra_body={"seed": 7}, extra_headers=one
        )
        for one in headers
    ]
    drawn = [pngs(answer.parse()) for answer in answers]
    assert drawn[0] == drawn[1] == drawn[2]
    assert pixels(drawn[0][0]).shape == (64, 64, 3)
    assert [answer.headers["x-penstock-cache"] for answer in answers] == ["miss", "hit", "miss"]
    found = rows.of([answer.headers["x-request-id"] for answer in answers])
    assert [row["pixel_steps"] for row in found][::2] == [64 * 64 * 20] * 2
    assert [bool(row["cost_usd"]) for row in found] == [True, False, True]


def test_image_stops_at_its_deadline_and_costs_nothing(
    client: openai.OpenAI, rows: Rows, text: str
) -> None:
    """The canceled image would take a minute on two cores; the next image does not wait for it."""
    limit_ms = int(3000 * PATIENCE)
    with pytest.raises(openai.APIStatusError) as caught:
        client.images.generate(
            model=MODEL,
            prompt=text,
            size="512x512",
            extra_body={"num_inference_steps": 100},
            extra_headers={"X-Penstock-Deadline-Ms": str(limit_ms)},
        )
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert f"deadline of {limit_ms / 1000:g} s" in caught.value.message
    small = client.images.with_raw_response.generate(
        model=MODEL, prompt=text, size="64x64", extra_body={"num_inference_steps": 2}
    )
    asked = [one.headers["x-request-id"] for one in (caught.value.response, small)]
    # The worker's row, which arrives once the worker has stopped, takes precedence over the API's.
    eventually(lambda: rows.of(asked)[0]["steps_saved"])
    late, after = rows.of(asked)
    assert after["status"] == "succeeded"
    assert (late["status"], late["error_code"], late["charged_share"]) == (
        "expired",
        "deadline_exceeded",
        0.0,
    )
    assert 0 < late["steps_saved"] < 100
    assert not late["cost_usd"]


def test_n_images_have_seeds_that_count_up(client: openai.OpenAI, rows: Rows, text: str) -> None:
    asking = client.images.with_raw_response
    both = asking.generate(model=MODEL, prompt=text, n=2, size="64x64", extra_body={"seed": 41})
    second = asking.generate(model=MODEL, prompt=text, size="64x64", extra_body={"seed": 42})
    drawn = pngs(both.parse())
    assert both.headers["x-penstock-seed"] == "41,42"
    assert drawn[0] != drawn[1]
    assert pngs(second.parse()) == [drawn[1]]
    assert second.headers["x-penstock-cache"] == "hit"
    assert len(rows.of([both.headers["x-request-id"]], count=2)) == 2


def circle_at(x: float) -> bytes:
    """A red circle this many pixels from the left, as a PNG."""
    png = io.BytesIO()
    draw(Scene("white", (DrawnShape("circle", "red", "medium", x, 32.0, 12.0),))).save(png, "PNG")
    return png.getvalue()


def test_edit_keeps_less_of_its_source_with_strength(client: openai.OpenAI, rows: Rows) -> None:
    sources = [circle_at(18.0), circle_at(46.0)]
    left: list[float] = []
    for strength, steps in ((0.1, 2), (0.5, 10), (1.0, 20)):
        answers = [
            client.images.with_raw_response.edit(
                model=MODEL,
                image=("source.png", source, "image/png"),
                prompt="a large green star",
                extra_body={"strength": strength, "seed": 5},
            )
            for source in sources
        ]
        edited = [pixels(pngs(answer.parse())[0]) for answer in answers]
        for drawn, source in zip(edited, sources, strict=True):
            assert drawn.shape == (64, 64, 3)
            assert np.abs(drawn - pixels(source)).mean() > 1
        # The two edits differ only in what remains of their sources.
        left.append(float(np.abs(edited[0] - edited[1]).mean()))
        found = rows.of([answer.headers["x-request-id"] for answer in answers])
        assert [row["pixel_steps"] for row in found] == [64 * 64 * steps] * 2
    assert left[0] > left[1] > left[2]
