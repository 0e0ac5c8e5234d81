"""Files that describe a trained pipeline: scores as JSON, a sheet of samples, a model card."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

SCORES, SHEET, CARD = "scores.json", "sheet.png", "README.md"
BEGIN, END = "<!-- scores: begin, written by score.py -->", "<!-- scores: end -->"
COLUMNS = 6
LARGER = 2
"""Times that a sample is enlarged on the sheet."""
_LINE_PX, _LINES = 13, 4
_LETTERS = 25
"""Of a caption in one line under its picture."""


def write_scores(folder: Path, scores: Mapping[str, Any], table: str) -> None:
    """Writes `scores` and the digest of their weights to the folder, and `table` to the card."""
    kept = {"weights_sha256": weights_sha256(folder), **scores}
    (folder / SCORES).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    card = folder / CARD
    before, _, rest = card.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    card.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def weights_sha256(folder: Path) -> str:
    """Of all weights together, in the order of their paths."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def captioned_sheet(
    captions: Sequence[str], pictures: Sequence[npt.NDArray[np.uint8]]
) -> Image.Image:
    """Pictures of one size in rows, each with its caption below."""
    side = pictures[0].shape[0] * LARGER
    width, height = side + 12, side + 8 + _LINES * _LINE_PX
    rows = -(-len(pictures) // COLUMNS)
    whole = Image.new("RGB", (COLUMNS * width, rows * height), (225, 225, 225))
    pen, font = ImageDraw.Draw(whole), ImageFont.load_default(size=10)
    for index, (caption, picture) in enumerate(zip(captions, pictures, strict=True)):
        left, top = index % COLUMNS * width + 6, index // COLUMNS * height + 6
        whole.paste(
            Image.fromarray(picture).resize((side, side), Image.Resampling.NEAREST), (left, top)
        )
        for number, line in enumerate(textwrap.wrap(caption, _LETTERS)[:_LINES]):
            pen.text((left, top + side + 2 + number * _LINE_PX), line, fill=(0, 0, 0), font=font)
    return whole
