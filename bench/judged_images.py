"""What the shipped image model draws with a mask and with an adapter, by the judge of shapes.

Through the API of a stack: held-out scenes whose first figure is masked and told anew, and held-out
captions with and without the adapter for ink. The judge does not know how an image was drawn.
"""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from bench.pipeline import image_stack
from bench.report import Figure, Outcome
from infra.local.stack import Stack
from models.shapes.draw import draw
from models.shapes.judge import Pixels, is_ink, read
from models.shapes.masked import REDRAWN_MIN, STRENGTH, Redrawing, redrawings, shows
from models.shapes.score import Asked, held_out, matched
from shared.catalog import Model
from shared.catalog_file import read_catalog

SCENES = 128
AT_ONCE = 16
CALL_LIMIT_S = 120.0
INK_MIN, PLAIN_MAX = 0.9, 0.1
INK = {"source": "package:models/shapes/ink/ink.safetensors"}


def run() -> Outcome:
    """Draws and judges all of them."""
    model = read_catalog(Path("models.yaml")).default("image")
    with image_stack({"adapters": {"ink": INK}}) as stack:
        masked, with_ink, without = asyncio.run(_drawn(stack, model))
    unchanged = [_is_kept(one, image) for one, image in masked]
    redrawn = [shows(image, one.after) for one, image in masked]
    figures = [
        Figure("masked figure redrawn as told", _part(redrawn), "", ">=", REDRAWN_MIN),
        Figure("outside of the mask unchanged", _part(unchanged), "", ">=", 1.0),
        Figure(
            "ink with its adapter",
            _part([is_ink(image) for _, image in with_ink]),
            "",
            ">=",
            INK_MIN,
        ),
        Figure(
            "ink without it", _part([is_ink(image) for _, image in without]), "", "<=", PLAIN_MAX
        ),
        Figure("right shapes with it", _part(_right_shapes(with_ink)), ""),
        Figure("right shapes without it", _part(_right_shapes(without)), ""),
    ]
    return Outcome(figures, {"images_of_each_kind": SCENES})


Redrawn = list[tuple[Redrawing, Pixels]]
Drawn = list[tuple[Asked, Pixels]]


async def _drawn(stack: Stack, model: Model) -> tuple[Redrawn, Drawn, Drawn]:
    """Masked scenes, captions in ink, and the same captions without."""
    scenes, captions = list(redrawings(SCENES)), held_out(SCENES)
    permits = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=None)
    headers = {"x-penstock-deadline-ms": str(int(CALL_LIMIT_S * 1000))}
    async with httpx.AsyncClient(
        base_url=stack.api_url, timeout=CALL_LIMIT_S, limits=limits, headers=headers
    ) as client:

        async def drawn(path: str, **body: Any) -> Pixels:
            async with permits:
                answer = await client.post(f"/v1/images/{path}", **body)
            answer.raise_for_status()
            return _pixels(base64.b64decode(answer.json()["data"][0]["b64_json"]))

        async def redrawn(one: Redrawing) -> Pixels:
            files = {
                "image": ("scene.png", _png(draw(one.before)), "image/png"),
                "mask": ("mask.png", _png(_transparent(one.mask)), "image/png"),
            }
            told = {"prompt": one.caption, "strength": STRENGTH, "seed": one.seed}
            return await drawn("edits", data=told | {"model": model.name}, files=files)

        async def captioned(one: Asked, **more: Any) -> Pixels:
            told = {"prompt": one.caption, "seed": one.seed, "model": model.name}
            return await drawn("generations", json=told | more)

        masked = await asyncio.gather(*map(redrawn, scenes))
        inked = await asyncio.gather(*(captioned(one, lora_weights="ink") for one in captions))
        plain = await asyncio.gather(*map(captioned, captions))
    return (
        list(zip(scenes, masked, strict=True)),
        list(zip(captions, inked, strict=True)),
        list(zip(captions, plain, strict=True)),
    )


def _is_kept(one: Redrawing, image: Pixels) -> bool:
    """True if all pixels outside of the mask are those of the scene."""
    outside = np.asarray(one.mask) == 0
    return np.array_equal(image[outside], np.asarray(draw(one.before))[outside])


def _right_shapes(drawn: Drawn) -> list[bool]:
    """Of each figure that was asked for, whether it has its shape, in whatever color."""
    return [
        seen is not None and seen.shape == figure.shape
        for one, image in drawn
        for figure, seen in matched(one.scene.figures, read(image).figures)
    ]


def _part(judged: list[bool]) -> float:
    return sum(judged) / len(judged)


def _transparent(mask: Image.Image) -> Image.Image:
    """A mask in OpenAI's form: transparent is drawn anew."""
    shown = Image.new("RGBA", mask.size)
    shown.putalpha(mask.point(lambda level: 255 - level))
    return shown


def _png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def _pixels(png: bytes) -> Pixels:
    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))
