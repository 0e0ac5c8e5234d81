import json
from pathlib import Path

import numpy as np
import pytest

from models.shapes.score import BEGIN, CARD, COLUMNS, END, SCORES, captioned_sheet, write_scores

# Otherwise, every process in a quick run would import torch just for this file.
pytestmark = pytest.mark.slow


def test_scores_are_kept_with_the_weights_they_are_of(tmp_path: Path) -> None:
    (tmp_path / CARD).write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    weights = tmp_path / "unet" / "model.safetensors"
    weights.parent.mkdir()
    digests = []
    for content in ("one", "one", "two"):
        weights.write_text(content)
        write_scores(tmp_path, {"scores": {}}, f"| {content} |")
        digests.append(json.loads((tmp_path / SCORES).read_text())["weights_sha256"])
        assert (tmp_path / CARD).read_text() == f"before\n{BEGIN}\n| {content} |\n{END}\nafter\n"
    assert digests[0] == digests[1] != digests[2]


def test_sheet_has_every_image_and_room_for_its_caption() -> None:
    images = [np.full((64, 64, 3), shade, np.uint8) for shade in range(0, 80, 10)]
    sheet = np.asarray(captioned_sheet(["a red circle " * 9] * len(images), images))
    assert sheet.shape[1] == COLUMNS * (sheet.shape[1] // COLUMNS)
    assert [
        bool((sheet == shade).all(axis=2).sum() >= 128 * 128) for shade in range(0, 80, 10)
    ] == [True] * 8
