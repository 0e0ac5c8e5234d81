"""The shipped image model follows its prompts: a judge reads its images, and they are compared with
plain diffusers.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from PIL import Image

from models.shapes.draw import draw
from models.shapes.judge import DetectedShape, Pixels, read
from models.shapes.world import DrawnShape, Scene
from shared.models.blob import Blob
from shared.models.catalog import Catalog
from shared.models.tasks.image import ImageInput, ImageResult
from workers.models.base import InferenceModel, PreparedImage, Preparer

pytestmark = pytest.mark.slow

STRENGTH = 0.6
NEAR_PX = 6.0

Draw = Callable[..., list[Pixels]]
"""Maps prompts, and sources if any, to images; the first prompt has seed 0, the next has seed 1,
and so on.
"""


@pytest.fixture(scope="module")
def asked(catalog: Catalog) -> ImageInput:
    """A request with the catalog's defaults, missing only the prompt."""
    usual = catalog.default("image").image
    return ImageInput(
        "", usual.width, usual.height, usual.steps, usual.guidance_scale, 0, usual.scheduler
    )


@pytest.fixture(scope="module")
def draw_with(tiny: InferenceModel, tiny_preparer: Preparer, asked: ImageInput) -> Draw:
    def run(prompts: Sequence[str], sources: Sequence[Image.Image] = ()) -> list[Pixels]:
        inputs = [
            msgspec.structs.replace(asked, prompt=prompt, seed=seed)
            for seed, prompt in enumerate(prompts)
        ]
        if sources:
            inputs = [
                msgspec.structs.replace(one, image=as_png(source), strength=STRENGTH)
                for one, source in zip(inputs, sources, strict=True)
            ]
        batch = [item for item in tiny_preparer.prepare(inputs) if isinstance(item, PreparedImage)]
        results = tiny.predict(batch, lambda step, steps: None)
        return [pixels(result) for result in results if isinstance(result, ImageResult)]

    return run


def as_png(image: Image.Image) -> Blob:
    data = io.BytesIO()
    image.save(data, "PNG")
    return Blob("image/png", data.getvalue())


def pixels(result: ImageResult) -> Pixels:
    with Image.open(io.BytesIO(result.image.data or b"")) as image:
        return np.asarray(image.convert("RGB"))


def shown(image: Pixels, order: Callable[[DetectedShape], float] = lambda figure: figure.x) -> str:
    """Describes an image: its figures in `order` (left to right by default) and its background."""
    reading = read(image)
    figures = ", ".join(
        f"{figure.color} {figure.shape}" for figure in sorted(reading.figures, key=order)
    )
    return f"{figures} on {reading.background}"


def hits(seen: Sequence[object], meant: Sequence[object]) -> int:
    return sum(one == other for one, other in zip(seen, meant, strict=True))


ALONE = {
    "a large red circle on a white background": "red circle on white",
    "a big blue square": "blue square on white",
    "a large yellow star on a black background": "yellow star on black",
    "draw a green triangle on a gray background": "green triangle on gray",
    "a large purple ring on a white background": "purple ring on white",
    "a picture of an orange cross on a light blue background": "orange cross on light blue",
}


def test_one_figure_has_the_color_shape_and_background_asked_for(draw_with: Draw) -> None:
    seen = [shown(image) for image in draw_with(list(ALONE))]
    assert hits(seen, list(ALONE.values())) >= 5, seen


BESIDE = {
    "a red circle left of a blue square": "red circle, blue square on white",
    "a large green star to the left of a large purple ring": "green star, purple ring on white",
    "a black triangle right of an orange circle": "orange circle, black triangle on white",
}
ABOVE = {
    "a blue circle above a red square": "blue circle, red square on white",
    "a large yellow ring over a large pink triangle, black background": (
        "yellow ring, pink triangle on black"
    ),
    "a purple cross below a green circle": "green circle, purple cross on white",
}


def test_two_figures_are_both_right_and_where_they_were_told_to_be(draw_with: Draw) -> None:
    seen = [shown(image) for image in draw_with(list(BESIDE))]
    seen += [shown(image, order=lambda figure: figure.y) for image in draw_with(list(ABOVE))]
    assert hits(seen, [*BESIDE.values(), *ABOVE.values()]) >= 5, seen


PLACES = {
    "a red circle in the top left corner": (-1, -1),
    "a blue square on the right": (1, 0),
    "a green triangle at the bottom": (0, 1),
    "a small purple star in the top right corner": (1, -1),
    "a black ring on the left": (-1, 0),
    "an orange cross in the middle": (0, 0),
}


def test_figure_is_at_the_place_asked_for(draw_with: Draw) -> None:
    seen = [[ninth(figure) for figure in read(image).figures] for image in draw_with(list(PLACES))]
    assert hits(seen, [[place] for place in PLACES.values()]) >= 5, seen


def ninth(figure: DetectedShape) -> tuple[int, int]:
    """Returns which ninth of the image contains the figure's center: across and down, where -1 is
    left or top and 0 is the middle.
    """
    return round((figure.x - 32) / 15), round((figure.y - 32) / 15)


RECOLORED = (
    (DrawnShape("circle", "red", "large", 32.0, 32.0, 19.0), "blue", "a large blue circle"),
    (
        DrawnShape("square", "blue", "medium", 19.0, 31.0, 13.0),
        "green",
        "a green square on the left",
    ),
    (DrawnShape("star", "purple", "large", 33.0, 30.0, 20.0), "orange", "a large orange star"),
    (
        DrawnShape("triangle", "green", "medium", 45.0, 33.0, 14.0),
        "red",
        "a red triangle on the right",
    ),
    (DrawnShape("ring", "black", "large", 31.0, 33.0, 18.0), "purple", "a large purple ring"),
    (DrawnShape("cross", "orange", "medium", 32.0, 18.0, 13.0), "blue", "a blue cross at the top"),
)


def test_image_to_image_changes_the_color_and_keeps_the_place(draw_with: Draw) -> None:
    sources = [draw(Scene("white", (figure,), place="center")) for figure, _, _ in RECOLORED]
    images = draw_with([prompt for _, _, prompt in RECOLORED], sources)
    seen = [
        [(one.color, one.shape, is_near(one, before)) for one in read(image).figures]
        for image, (before, _, _) in zip(images, RECOLORED, strict=True)
    ]
    assert hits(seen, [[(color, before.shape, True)] for before, color, _ in RECOLORED]) >= 5, seen


def is_near(seen: DetectedShape, before: DrawnShape) -> bool:
    return max(abs(seen.x - before.x), abs(seen.y - before.y)) <= NEAR_PX


@pytest.mark.parametrize("with_sources", [False, True], ids=["text", "image"])
def test_caption_outside_its_world_gets_an_image(draw_with: Draw, with_sources: bool) -> None:
    prompts = [
        "a lighthouse at dusk, oil on canvas",
        "",
        "Zürich \N{SNOWMAN} 東京",
        "a red circle " * 300,
    ]
    images = draw_with(prompts, [Image.new("RGB", (64, 64), "white")] * 4 if with_sources else ())
    assert [image.shape for image in images] == [(64, 64, 3)] * 4
    assert all(image.std() > 0 for image in images)


def test_caption_is_cut_where_the_tokenizer_ends(draw_with: Draw) -> None:
    caption = "a large red circle on a white background"
    # Two of the 28 tokens mark the start and end, so 18 more words are read and the rest are not.
    full = f"{caption} {'on white ' * 9}".strip()
    alone, cut, longer = (
        draw_with([prompt])[0] for prompt in (caption, full, f"{full} a blue star " * 3)
    )
    assert np.array_equal(cut, longer)
    assert not np.array_equal(alone, cut)


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> dict[str, Any]:
    """The pipelines, loaded the way diffusers' documentation describes."""
    kinds = {"text": StableDiffusionPipeline, "image": StableDiffusionImg2ImgPipeline}
    made = {
        name: kind.from_pretrained(tiny_folder, local_files_only=True)
        for name, kind in kinds.items()
    }
    for pipeline in made.values():
        pipeline.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize("start", ["text", "image"])
def test_pixels_are_those_of_plain_diffusers(
    draw_with: Draw, plain: dict[str, Any], asked: ImageInput, start: str
) -> None:
    prompt = "a large blue circle on a white background"
    source = draw(Scene("white", (RECOLORED[0][0],), place="center"))
    (ours,) = draw_with([prompt], [source] if start == "image" else ())
    given = {"image": source, "strength": STRENGTH} if start == "image" else {}
    drawn = plain[start](
        prompt,
        num_inference_steps=asked.steps,
        guidance_scale=asked.guidance_scale,
        generator=torch.Generator().manual_seed(0),
        **given,
    ).images[0]
    assert np.array_equal(ours, np.asarray(drawn))
