"""The demo's description of an image, and its catalog with a model that generates text.

`make demo` runs the whole demo.
"""

import io
from pathlib import Path

import pytest
import yaml

from infra.local.demo import MODEL, what_it_shows, with_text_model
from models.shapes.draw import draw
from models.shapes.world import DrawnShape, Scene
from shared.errors import ConfigurationError
from shared.models.catalog_file import read_catalog
from shared.models.interface import ModelInterface

RED_CIRCLE = DrawnShape("circle", "red", "medium", 17.0, 32.0, 10.0)
ORANGE_STAR = DrawnShape("star", "orange", "medium", 47.0, 32.0, 10.0)


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        (Scene("white", (RED_CIRCLE,), place="left"), "a red circle on white"),
        (
            Scene("light blue", (RED_CIRCLE, ORANGE_STAR), relation="beside"),
            "a red circle and an orange star on light blue",
        ),
        (Scene("black", (), place="center"), "no figure on black"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_demo_says_what_an_image_shows(scene: Scene, words: str) -> None:
    png = io.BytesIO()
    draw(scene).save(png, "PNG")
    assert what_it_shows(png.getvalue()) == words


def test_text_model_joins_the_others_of_the_catalog(tmp_path: Path) -> None:
    before = [model.name for model in read_catalog(Path("models.yaml")).models]
    made = with_text_model(Path("models.yaml"), tmp_path / "new" / "models.yaml")
    catalog = read_catalog(made)
    assert [model.name for model in catalog.models] == [*before, MODEL]
    assert catalog.default("text").name == MODEL


def test_catalog_that_follows_the_examples_has_the_text_model_once(tmp_path: Path) -> None:
    document = Path("examples/README.md").read_text(encoding="utf-8")
    entry = document.partition("```yaml\n")[2].partition("```")[0]
    followed = tmp_path / "models.yaml"
    followed.write_text(Path("models.yaml").read_text(encoding="utf-8") + entry)
    names = [model.name for model in read_catalog(followed).models]
    made = with_text_model(followed, tmp_path / "new" / "models.yaml")
    assert [model.name for model in read_catalog(made).models] == names


def test_new_catalog_finds_interfaces_beside_the_old_one(tmp_path: Path) -> None:
    interface = ModelInterface(
        inputs={"type": "object", "properties": {"text": {"type": "string"}}},
        output={"type": "string"},
        cog_version="0.23.1",
        sources_sha256="0" * 64,
    )
    (tmp_path / "penstock.schema.json").write_text(interface.as_json)
    before = tmp_path / "models.yaml"
    entry = {
        "name": "mine",
        "task": "custom",
        "source": "gs://bucket/mine",
        "interface": "penstock.schema.json",
    }
    before.write_text(yaml.safe_dump({"models": [entry]}))
    wanted = read_catalog(before).models[0].interface
    assert wanted is not None
    made = with_text_model(before, tmp_path / "new" / "models.yaml")
    assert read_catalog(made).models[0].interface == wanted


def test_the_examples_add_the_same_text_model(tmp_path: Path) -> None:
    made = with_text_model(Path("models.yaml"), tmp_path / "models.yaml")
    document = Path("examples/README.md").read_text(encoding="utf-8")
    entry = document.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(entry) == yaml.safe_load(made.read_text(encoding="utf-8"))["models"][-1:]


@pytest.mark.parametrize("catalog", ["models: [", "models: {}", "- 1"])
def test_invalid_catalog_is_told(tmp_path: Path, catalog: str) -> None:
    (tmp_path / "models.yaml").write_text(catalog)
    with pytest.raises(ConfigurationError, match=r"models\.yaml"):
        with_text_model(tmp_path / "models.yaml", tmp_path / "new" / "models.yaml")
