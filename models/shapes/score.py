"""`python -m models.shapes.score FOLDER`: the share of images that the judge accepts.

The captions describe scenes that were not in the training. A figure counts as right only if the
judge finds it in the image. Extra figures count against the whole image. The files describe a
trained pipeline: scores as JSON, a sheet of samples, and a model card.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont

from models.shapes.captions import tell
from models.shapes.draw import draw
from models.shapes.judge import DetectedScene, DetectedShape, Pixels, read
from models.shapes.world import COLORS, DrawnShape, Scene, sample_scene

SCORES, SHEET, CARD = "scores.json", "sheet.png", "README.md"
BEGIN, END = "<!-- scores: begin, written by score.py -->", "<!-- scores: end -->"
COLUMNS = 6
LARGER = 2
"""Factor by which samples are enlarged on the sheet."""
_LINE_PX, _LINES = 13, 4
_LETTERS = 25
"""Maximum letters per caption line below an image."""


def write_scores(folder: Path, scores: Mapping[str, Any], table: str) -> None:
    """Writes `scores` and the weights' digest to the folder, and `table` to the card."""
    document = {"weights_sha256": weights_sha256(folder), **scores}
    (folder / SCORES).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    card = folder / CARD
    before, _, rest = card.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    card.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def weights_sha256(folder: Path) -> str:
    """Returns the digest of all weights, in the order of their paths."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def captioned_sheet(
    captions: Sequence[str], images: Sequence[npt.NDArray[np.uint8]]
) -> Image.Image:
    """Images of one size in rows, each with its caption below."""
    side = images[0].shape[0] * LARGER
    width, height = side + 12, side + 8 + _LINES * _LINE_PX
    rows = -(-len(images) // COLUMNS)
    whole = Image.new("RGB", (COLUMNS * width, rows * height), (225, 225, 225))
    pen, font = ImageDraw.Draw(whole), ImageFont.load_default(size=10)
    for index, (caption, image) in enumerate(zip(captions, images, strict=True)):
        left, top = index % COLUMNS * width + 6, index // COLUMNS * height + 6
        whole.paste(
            Image.fromarray(image).resize((side, side), Image.Resampling.NEAREST), (left, top)
        )
        for number, line in enumerate(textwrap.wrap(caption, _LETTERS)[:_LINES]):
            pen.text((left, top + side + 2 + number * _LINE_PX), line, fill=(0, 0, 0), font=font)
    return whole


STEPS = 20
GUIDANCE = 2.0
STRENGTH = 0.6
SEED = 2024
PLACE_MAX = 6.0
"""Maximum pixels that a figure may move in image-to-image to count as in place."""
_AT_ONCE = 25
SAMPLES = 24
"""Number of held-out captions on the sheet of samples."""


@dataclass(frozen=True)
class Asked:
    """A held-out scene, its caption and the seed of its noise."""

    scene: Scene
    caption: str
    seed: int


@dataclass
class Accuracy:
    """How many were right, out of how many."""

    right: int = 0
    of: int = 0

    def add(self, right: int, of: int = 1) -> None:
        self.right += right
        self.of += of

    @property
    def part(self) -> float:
        """Returns a share from 0 to 1. It is 0 if nothing was counted."""
        return self.right / self.of if self.of else 0.0


TARGETS = {
    "color right": 0.95,
    "shape right": 0.90,
    "two objects both right": 0.75,
    "relation right": 0.70,
    "recolored, place kept": 0.80,
}
"""Minimum scores of the model, by their names in the table."""


def main(arguments: list[str] | None = None) -> int:
    """Prints the table. Fails if a target is missed."""
    parser = argparse.ArgumentParser(prog="models.shapes.score", description=__doc__)
    parser.add_argument("folder", type=Path, help="of a diffusers pipeline")
    parser.add_argument("--captions", type=int, default=500)
    parser.add_argument("--edits", type=int, default=100, help="images to image")
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument(
        "--keep",
        action="store_true",
        help=f"write {SCORES}, {SHEET} and the card's table into FOLDER",
    )
    options = parser.parse_args(arguments)
    pipeline = load(options.folder)
    captioned = held_out(options.captions)
    table = score_text(pipeline, captioned, options.guidance)
    table |= score_edits(pipeline, options.edits, options.guidance)
    print(as_text(table))
    if options.keep:
        scores = {name: {"right": tally.right, "of": tally.of} for name, tally in table.items()}
        write_scores(
            options.folder,
            {"steps": STEPS, "guidance": options.guidance, "scores": scores},
            as_text(table),
        )
        some = captioned[:SAMPLES]
        samples = captioned_sheet(
            [request.caption for request in some], draw_asked(pipeline, some, options.guidance)
        )
        samples.quantize(256).save(options.folder / SHEET, optimize=True)
    return int(any(table[name].part < target for name, target in TARGETS.items()))


def load(folder: Path) -> Any:
    """Returns a folder's text-to-image pipeline, without any code of ours."""
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def held_out(number: int, seed: int = SEED) -> list[Asked]:
    """Returns captions that were not in the training, alternating one and two figures.

    They depend only on the seed.
    """
    rng = random.Random(seed)
    scenes = [sample_scene(rng, held_out=True, figures=1 + index % 2) for index in range(number)]
    return [Asked(scene, tell(scene, rng), seed=index) for index, scene in enumerate(scenes)]


def score_text(
    pipeline: Any, asked: Sequence[Asked], guidance: float = GUIDANCE
) -> dict[str, Accuracy]:
    """Returns the table's part for text-to-image."""
    images = [
        image
        for at in range(0, len(asked), _AT_ONCE)
        for image in draw_asked(pipeline, asked[at : at + _AT_ONCE], guidance)
    ]
    return score_drawn(asked, images)


def score_drawn(asked: Sequence[Asked], images: Sequence[Pixels]) -> dict[str, Accuracy]:
    """Returns the table's part for images of captions, [64, 64, 3] each."""
    table = {
        name: Accuracy()
        for name in ("color right", "shape right", "two objects both right", "relation right")
    }
    table |= {
        name: Accuracy()
        for name in ("one object right", "place right", "background right", "number right")
    }
    for request, image in zip(asked, images, strict=True):
        _count(table, request.scene, read(image))
    return table


def draw_asked(
    pipeline: Any, asked: Sequence[Asked], guidance: float = GUIDANCE, steps: int = STEPS
) -> list[Pixels]:
    """Returns an image per caption, [64, 64, 3]."""
    drawn = pipeline(
        [request.caption for request in asked],
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=[torch.Generator("cpu").manual_seed(request.seed) for request in asked],
    )
    return [np.asarray(image.convert("RGB")) for image in drawn.images]


def _count(table: dict[str, Accuracy], scene: Scene, detected: DetectedScene) -> None:
    pairs = matched(scene.figures, detected.figures)
    colors = [seen is not None and seen.color == figure.color for figure, seen in pairs]
    shapes = [seen is not None and seen.shape == figure.shape for figure, seen in pairs]
    as_many = len(detected.figures) == len(scene.figures)
    whole = as_many and all(colors) and all(shapes)
    table["color right"].add(sum(colors), len(colors))
    table["shape right"].add(sum(shapes), len(shapes))
    table["number right"].add(as_many)
    table["background right"].add(detected.background == scene.background)
    if len(scene.figures) == 1:
        table["one object right"].add(whole)
        seen = pairs[0][1]
        table["place right"].add(seen is not None and _is_near(scene.figures[0], seen))
        return
    table["two objects both right"].add(whole)
    if scene.relation != "beside":
        table["relation right"].add(_is_related(scene, pairs[0][1], pairs[1][1]))


def matched(
    asked: Sequence[DrawnShape], seen: Sequence[DetectedShape]
) -> list[tuple[DrawnShape, DetectedShape | None]]:
    """Pairs each requested figure with a detected one, to maximize matching colors and shapes."""
    padded: list[DetectedShape | None] = [*seen, *[None] * len(asked)]
    ways = itertools.permutations(padded[: len(seen) + len(asked)], len(asked))
    best = max(
        ways,
        key=lambda way: sum(
            _likeness(figure, other) for figure, other in zip(asked, way, strict=True)
        ),
    )
    return list(zip(asked, best, strict=True))


def _likeness(asked: DrawnShape, seen: DetectedShape | None) -> float:
    if seen is None:
        return 0.0
    return 1.0 + 2 * (asked.color == seen.color) + 2 * (asked.shape == seen.shape)


def _is_near(figure: DrawnShape, seen: DetectedShape) -> bool:
    """True if it is in about the same ninth of the image: within 9 pixels on each axis."""
    return max(abs(figure.x - seen.x), abs(figure.y - seen.y)) <= 9.0


def _is_related(scene: Scene, first: DetectedShape | None, second: DetectedShape | None) -> bool:
    """True if both figures exist, with color or shape, in the right relation."""
    if first is None or second is None:
        return False
    for figure, seen in zip(scene.figures, (first, second), strict=True):
        if figure.color != seen.color and figure.shape != seen.shape:
            return False
    across, down = second.x - first.x, second.y - first.y
    first_figure, second_figure = scene.figures
    if (first_figure.shape, first_figure.color) == (second_figure.shape, second_figure.color):
        # Either one may be the first.
        across, down = abs(across), abs(down)
    return across > abs(down) if scene.relation == "left of" else down > abs(across)


def score_edits(pipeline: Any, number: int, guidance: float = GUIDANCE) -> dict[str, Accuracy]:
    """Scores image-to-image with a new color: color changed, and figure still in place."""
    from diffusers import StableDiffusionImg2ImgPipeline

    image_to_image = StableDiffusionImg2ImgPipeline(
        **pipeline.components, requires_safety_checker=False
    )
    image_to_image.set_progress_bar_config(disable=True)
    rng = random.Random(SEED + 1)
    tally = Accuracy()
    for seed in range(number):
        scene = sample_scene(rng, held_out=True, figures=1)
        before = scene.figures[0]
        color = rng.choice(
            [name for name in COLORS if name not in (before.color, scene.background)]
        )
        after = Scene(scene.background, (recolored(before, color),), place=scene.place)
        drawn = image_to_image(
            tell(after, rng),
            image=draw(scene),
            strength=STRENGTH,
            num_inference_steps=STEPS,
            guidance_scale=guidance,
            generator=torch.Generator("cpu").manual_seed(seed),
        ).images[0]
        seen = matched(after.figures, read(np.asarray(drawn)).figures)[0][1]
        tally.add(seen is not None and seen.color == color and _has_stayed(before, seen))
    return {"recolored, place kept": tally}


def recolored(figure: DrawnShape, color: str) -> DrawnShape:
    """Returns the same figure in another color."""
    return DrawnShape(figure.shape, color, figure.size, figure.x, figure.y, figure.radius)


def _has_stayed(before: DrawnShape, seen: DetectedShape) -> bool:
    return max(abs(before.x - seen.x), abs(before.y - seen.y)) <= PLACE_MAX


def as_text(table: dict[str, Accuracy]) -> str:
    lines = ["| what | right | of | part | target |", "|---|---|---|---|---|"]
    for name, tally in table.items():
        target = f"{TARGETS[name]:.0%}" if name in TARGETS else ""
        lines.append(f"| {name} | {tally.right} | {tally.of} | {tally.part:.1%} | {target} |")
    return "\n".join(lines)


def sheet(images: Sequence[Pixels], columns: int) -> Image.Image:
    """Returns images side by side, row by row."""
    side = images[0].shape[0]
    rows = -(-len(images) // columns)
    whole = Image.new("RGB", (columns * side, rows * side), (255, 255, 255))
    for index, image in enumerate(images):
        whole.paste(Image.fromarray(image), (index % columns * side, index // columns * side))
    return whole


if __name__ == "__main__":
    sys.exit(main())
