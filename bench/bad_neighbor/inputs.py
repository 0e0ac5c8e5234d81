"""Both tenants' inputs: words, images, and batch lines that no cache contains.

This module imports little, because the noisy tenant's process imports it and should start quickly.
"""

from __future__ import annotations

import base64
import io
import json
import random
from typing import Any

import numpy as np
from PIL import Image

EMBEDDER, PAINTER, WRITER = "all-MiniLM-L6-v2", "stable-diffusion-tiny", "tiny-text"
QUIET, BAD, SPENT = "quiet", "bad", "bad-spent"
"""Key names. The last key also belongs to the noisy tenant, but its budget is used up."""
MAX_TOKENS = 192
"""The longest text that WRITER generates."""
_WORDS = [
    "river", "engine", "violin", "glacier", "market", "comet", "harbor", "orchard", "mill",
    "lantern", "copper", "window", "forest", "signal", "bridge", "winter",
]  # fmt: skip


def text(words: int) -> str:
    """Returns a text with this many words. The text starts with a number, so all texts differ."""
    chosen = random.choices(_WORDS, k=max(1, words - 1))
    return " ".join([str(random.randrange(2**48)), *chosen])


def noise_image(side: int) -> str:
    """Returns a PNG image of noise, `side` pixels wide and high, as a data: URI."""
    noise = np.random.default_rng().integers(0, 255, (side, side, 3), dtype=np.uint8)
    return _png(Image.fromarray(noise))


def plain_image(side: int) -> str:
    """Returns an image of the same size in a single color: few bytes, but just as many pixels."""
    return _png(Image.new("RGB", (side, side), "navy"))


def _png(image: Image.Image) -> str:
    png = io.BytesIO()
    image.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def edit(source: str, size: str, steps: int, **changes: object) -> dict[str, Any]:
    return {
        "prompt": f"a red circle {random.randrange(2**48)}",
        "images": [{"image_url": source}],
        "size": size,
        "num_inference_steps": steps,
        "strength": 0.6,
        **changes,
    }


def chat(model: str, words: int, tokens: int, **changes: object) -> dict[str, Any]:
    """Returns a chat request with this many prompt words and at most this many output tokens."""
    message = {"role": "user", "content": text(words)}
    return {"model": model, "messages": [message], "max_tokens": tokens, **changes}


def batch_file(lines: int, words: int) -> bytes:
    return "".join(
        json.dumps(
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/embeddings",
                "body": {"model": EMBEDDER, "input": text(words), "encoding_format": "base64"},
            }
        )
        + "\n"
        for number in range(lines)
    ).encode()
