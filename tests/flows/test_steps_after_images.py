"""Catalog entries with steps after an image, and lists that flows process in parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.errors import BadInput, ConfigurationError
from shared.models.catalog import Catalog, flow_of
from shared.models.catalog_file import read_catalog
from shared.models.entry import FlowEntry
from shared.models.flow_plan import FlowStep, plan_step
from shared.models.tasks.image import ImageInput, ImagesInput
from tests.flows.models import CHECK, JOIN, SPLIT, class_entry

FILE, NUMBER, BOOLEAN = (
    {"type": "string", "format": "uri"},
    {"type": "number"},
    {"type": "boolean"},
)
SAFE = {"type": "object", "properties": {"is_safe": BOOLEAN}}
CLASSES = {
    "judge": class_entry("judge", {"image": FILE, "threshold": NUMBER}, SAFE),
    "deaf": class_entry("deaf", {"image": FILE}, SAFE),
    "mute": class_entry("mute", {"image": FILE, "threshold": NUMBER}, NUMBER),
    "vague": class_entry(
        "vague",
        {"image": FILE, "threshold": NUMBER},
        {"type": "object", "properties": {"is_safe": {"type": "string"}}},
    ),
    "enlarge": class_entry("enlarge", {"image": FILE, "scale": NUMBER}, FILE),
    "double": class_entry("double", {"image": FILE, "scale": NUMBER | {"maximum": 2}}, FILE),
    "wordy": class_entry("wordy", {"image": FILE, "scale": NUMBER}, {"type": "string"}),
}


def write_catalog(folder: Path, image: dict[str, Any], **more: Any) -> Path:
    drawing = {
        "name": "draw",
        "task": "image",
        "source": "local:nowhere",
        "batch": {"max_pixel_steps": 1000},
        "image": image,
        **more,
    }
    entries = [drawing]
    for name, model in CLASSES.items():
        assert model.interface is not None
        (folder / name).mkdir()
        (folder / name / "penstock.schema.json").write_text(model.interface.as_json)
        entries.append({"name": name, "task": "custom", "source": f"local:{folder}/{name}"})
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": entries}))
    return path


def test_an_entry_with_both_steps_is_read(tmp_path: Path) -> None:
    image = {"safety": {"model": "judge", "threshold": 0.8}, "upscale": {"model": "enlarge"}}
    catalog = read_catalog(write_catalog(tmp_path, image))
    draw = catalog.find("draw")
    assert [model.name for model in catalog.served] == ["draw", *CLASSES], "no flow is listed"
    for upscales, steps in ((True, ["image", "safety", "upscale"]), (False, ["image", "safety"])):
        flow = catalog.image_run(draw, upscales=upscales)
        assert flow is not None
        assert (flow.name, flow.limited_unit) == ("draw", "pixel_steps")
        assert [step.id for step, _ in flow.steps] == steps
        # As much time as all steps take together.
        assert flow.deadline.default_s == 30.0 * len(steps)
    assert catalog.image_run(catalog.find("draw"), upscales=False) is not None


def test_a_budget_reserves_as_many_items_of_each_step_as_images(tmp_path: Path) -> None:
    image = {"safety": {"model": "judge", "threshold": 0.8}, "upscale": {"model": "enlarge"}}
    catalog = read_catalog(write_catalog(tmp_path, image))
    run = catalog.image_run(catalog.find("draw"), upscales=True)
    assert run is not None
    drawing = ImageInput("a cat", 8, 16, 5, 7.5, 1, "ddim")
    bounds = run.find_bounds([ImagesInput(drawing, [1, 2, 3], is_repeatable=True)])
    assert [(model.name, [bound.work for bound in works]) for model, works in bounds] == [
        ("draw", [8 * 16 * 5] * 3),
        ("judge", [1] * 3),
        ("enlarge", [1] * 3),
    ]


@pytest.mark.parametrize(
    ("image", "place", "reason"),
    [
        (
            {"safety": {"model": "nobody"}},
            "image.safety.model",
            "model 'nobody' is not in the catalog",
        ),
        (
            {"upscale": {"model": "nobody"}},
            "image.upscale.model",
            "model 'nobody' is not in the catalog",
        ),
        ({"safety": {"model": "deaf", "threshold": 0.5}}, "image.safety", "is not an input of"),
        ({"safety": {"model": "judge"}}, "image.safety", "threshold: is required by judge"),
        (
            {"safety": {"model": "mute", "threshold": 0.5}},
            "image.safety",
            "has no field 'is_safe'",
        ),
        ({"safety": {"model": "vague", "threshold": 0.5}}, "image.safety", "is_safe"),
        ({"safety": {"model": "judge", "threshold": 2}}, "image.safety.threshold", "less than"),
        ({"upscale": {"model": "judge"}}, "image.upscale", "is not an input of"),
        ({"upscale": {"model": "double"}}, "image.upscale", "scale: 4 must be at most 2"),
        ({"upscale": {"model": "wordy"}}, "image.upscale", "a string is not a file"),
    ],
)
def test_a_wrong_step_is_refused_by_its_place(
    tmp_path: Path, image: dict[str, Any], place: str, reason: str
) -> None:
    path = write_catalog(tmp_path, image)
    with pytest.raises(ConfigurationError) as caught:
        read_catalog(path)
    message = caught.value.message
    assert message.startswith(f"{path}:"), message
    assert f": {place}: " in message
    assert reason in message


def test_a_check_and_a_canary_do_not_go_together(tmp_path: Path) -> None:
    image = {"safety": {"model": "deaf"}}
    with pytest.raises(ConfigurationError, match=r"image\.safety: a canary receives no flow steps"):
        read_catalog(write_catalog(tmp_path, image, canary={"revision": "2"}))


def step(**more: Any) -> FlowStep:
    lists = {"word": "$words", "check": "$check"}
    fields = {"id": "x", "model": JOIN.name, "for_each": lists, "input": {"words": ["$item.word"]}}
    return FlowStep.model_validate(fields | more)


def test_lists_side_by_side_have_their_elements_together() -> None:
    scope = {"words": ["a", "b", None], "check": [{"flagged": False}, {"flagged": True}, None]}
    one = step(when="$item.check.flagged == false")
    assert plan_step(one, scope) == {0: {"words": ["a"]}}
    assert plan_step(step(), scope) == {0: {"words": ["a"]}, 1: {"words": ["b"]}}
    assert plan_step(step(), scope | {"check": None}) == {}


def test_lists_of_other_lengths_end_the_run() -> None:
    with pytest.raises(BadInput, match="must all have the same length"):
        plan_step(step(), {"words": ["a"], "check": []})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"input": {"words": ["$item"]}}, r"\$item\.word, \$item\.check"),
        ({"input": {"words": ["$item.other"]}}, r"\$item\.word, \$item\.check"),
        ({"for_each": {}}, "for_each"),
        ({"for_each": {"word": "words"}}, "not a reference"),
    ],
)
def test_an_element_of_one_of_several_lists_is_named(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        step(**more)


def test_types_of_lists_side_by_side_are_checked() -> None:
    words = {"id": "words", "model": SPLIT.name, "input": {"text": "$input.text"}}
    check = {"id": "check", "model": CHECK.name, "for_each": "$words", "input": {"word": "$item"}}
    wrong = step(input={"words": ["$item.check.size"]}).model_dump(exclude_unset=True)
    entry = FlowEntry.model_validate(
        {"name": "zip", "input": {"text": "string"}, "steps": [words, check, wrong], "output": "$x"}
    )
    with pytest.raises(ValueError, match="an integer is not a string"):
        flow_of(entry, Catalog((SPLIT, CHECK, JOIN)))
