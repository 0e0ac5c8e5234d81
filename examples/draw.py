"""Generates an image with Replicate's client and saves it as a PNG file.

Run `make up` first, then `.venv/bin/python examples/draw.py "a green star" star.png`. Both
arguments are optional. To use a different address or a key, set PENSTOCK_URL and PENSTOCK_API_KEY.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from replicate.client import Client

URL = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8080")


def main(prompt: str = "a large red circle", file: str = "image.png") -> None:
    """Generates one image from `prompt` and saves it to `file`."""
    client = Client(base_url=URL, api_token=os.environ.get("PENSTOCK_API_KEY", "any"))
    # Model names are unique, so the owner before the slash can be anything.
    images: Any = client.run("any/stable-diffusion-tiny", input={"prompt": prompt, "seed": 7})
    content = images[0].read()
    Path(file).write_bytes(content)
    print(f"{file}: {len(content):,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:3])
