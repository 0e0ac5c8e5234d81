"""Invalid flows are rejected when the catalog is read, with line and location."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadInput, ConfigurationError
from shared.models.catalog import Catalog, flow_of
from shared.models.catalog_file import read_catalog
from shared.models.entry import FlowEntry
from shared.models.flow_plan import MISSING, Condition, Reference, parse_condition
from tests.api.harness import CATALOG
from tests.flows.models import CHECK, JOIN, SPLIT, class_entry

WORDS = {"id": "words", "model": SPLIT.name, "input": {"text": "$input.text"}}
CHECKED = {"id": "check", "model": CHECK.name, "for_each": "$words", "input": {"word": "$item"}}
ONE = {"name": "spell", "input": {"text": "string"}, "steps": [WORDS, CHECKED], "output": "$check"}


def write_catalog(folder: Path, *flows: Any) -> Path:
    entries = []
    for model in (SPLIT, CHECK, JOIN):
        assert model.interface is not None
        (folder / model.name).mkdir(exist_ok=True)
        (folder / model.name / "penstock.schema.json").write_text(model.interface.as_json)
        entries.append(
            {"name": model.name, "task": "custom", "source": f"local:{folder}/{model.name}"}
        )
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump({"models": entries, "flows": list(flows)}))
    return path


def steps(*more: dict[str, Any]) -> dict[str, Any]:
    return {"steps": [WORDS, CHECKED, *more]}


def test_flow_is_read(tmp_path: Path) -> None:
    catalog = read_catalog(write_catalog(tmp_path, ONE | {"aliases": ["speller"]}))
    assert catalog.find("speller").name == "spell"
    assert [model.name for model in catalog.served][-1] == "spell"
    assert "spell" not in [model.name for model in catalog.deployed]
    assert "spell" not in [model.name for model in catalog.models]


JOINED = {"id": "joined", "model": JOIN.name, "input": {"words": "$check.word"}}


@pytest.mark.parametrize(
    ("changes", "place", "reason"),
    [
        (
            steps(JOINED | {"model": "nobody"}),
            "steps.2.model",
            "model 'nobody' is not in the catalog",
        ),
        (steps(JOINED | {"input": {"words": "$nobody"}}), "entry", "step 'nobody' does not exist"),
        (
            steps(JOINED | {"input": {"words": "$check.nothing"}}),
            "steps.2.input.words",
            "the field 'nothing' does not exist",
        ),
        (steps(JOINED | {"input": {"words": "$check.size"}}), "steps.2.input.words", "integer"),
        (
            steps(JOINED | {"input": {"words": "$input.text"}}),
            "steps.2.input.words",
            "not a list",
        ),
        (steps(JOINED | {"input": {"others": []}}), "steps.2.input.others", "is not an input of"),
        (steps(JOINED | {"input": {}}), "steps.2.input", "is required by"),
        (steps(JOINED | {"input": {"words": "$Check"}}), "steps.2.input", "not a reference"),
        (steps(JOINED | {"for_each": "$input.text"}), "steps.2.for_each", "must be a list"),
        (steps(JOINED | {"when": "$check"}), "steps.2.when", "not a condition"),
        (steps(JOINED | {"when": "$input.text < 3"}), "steps.2.when", "can't be ordered"),
        (steps(JOINED | {"when": "$input.text == true"}), "steps.2.when", "never equal"),
        (steps(JOINED | {"default": 7}), "steps.2.default", "7 is not a string"),
        (steps(JOINED | {"retries": 9}), "steps.2.retries", "less than or equal to 5"),
        (steps(JOINED | {"id": "words"}), "entry", "already used by another step"),
        (steps(JOINED | {"id": "item"}), "steps.2.id", "special meaning"),
        (
            steps(JOINED | {"input": {"words": ["$item"]}}),
            "steps.2",
            "only available in steps with for_each",
        ),
        (
            steps(
                JOINED | {"when": "$more == $input.text"},
                JOINED | {"id": "more"} | {"when": "$joined == $input.text"},
            ),
            "entry",
            "circular dependency: joined -> more",
        ),
        ({"output": {"words": "$nobody"}}, "entry", "step 'nobody' does not exist"),
        ({"input": {"text": "texts"}}, "input", "is not a type"),
        ({"input": {"text": [{"type": "string"}]}}, "input", "is not a type"),
        ({"input": {"text": [["string"]]}}, "input", "is not a type"),
        (
            steps(JOINED | {"input": {"words": date(2026, 11, 30)}}),
            "steps.2.input.words",
            '"2026-11-30" is not a list',
        ),
        ({"steps": []}, "steps", "at least 1"),
        ({"speed": 3}, "speed", "Extra inputs"),
    ],
)
def test_wrong_flow_is_refused_by_its_place(
    tmp_path: Path, changes: dict[str, Any], place: str, reason: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_catalog(write_catalog(tmp_path, ONE | changes))
    assert refused.value.field == place
    assert reason in refused.value.message
    assert "models.yaml:" in refused.value.message


def test_flow_that_contains_itself_is_refused(tmp_path: Path) -> None:
    words: list[Any] = []
    words.append(words)  # written with an anchor
    path = write_catalog(tmp_path, ONE | steps(JOINED | {"input": {"words": words}}))
    with pytest.raises(ConfigurationError, match=r"models\.yaml:\d+: must not contain itself"):
        read_catalog(path)


@pytest.mark.parametrize("name", [SPLIT.name, "spell"])
def test_name_that_is_taken_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the name '{name}' is already used"):
        read_catalog(write_catalog(tmp_path, ONE, ONE | {"name": "other", "aliases": [name]}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source": "flow:x"}, "source: String should match pattern '^(hf:|gs://|"),
        ({"flow": None}, "flow: Extra inputs"),
        ({"step_models": []}, "step_models: Extra inputs"),
        ({"drawn_by": None}, "drawn_by: Extra inputs"),
    ],
)
def test_flow_among_the_models_is_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = write_catalog(tmp_path)
    entry = yaml.safe_load(path.read_text())["models"][0] | change
    path.write_text(
        yaml.safe_dump({"models": [entry | {"interface": "split-words/penstock.schema.json"}]})
    )
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        read_catalog(path)


REFERENCES = st.builds(
    Reference,
    st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True),
    st.lists(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True), max_size=3).map(tuple),
)
LITERALS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
OPERATORS = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])


@given(st.builds(Condition, REFERENCES | LITERALS, OPERATORS, REFERENCES | LITERALS))
def test_condition_is_read_as_it_is_written(condition: Condition) -> None:
    assert parse_condition(str(condition)) == condition


@given(LITERALS, OPERATORS, LITERALS)
def test_condition_compares_values(left: object, operator: str, right: object) -> None:
    by_name = Condition(Reference("a"), operator, Reference("b"))
    written = Condition(left, operator, right)
    outcomes: list[bool | None] = []
    for one in (by_name, written):
        try:
            outcomes.append(one.holds({"a": left, "b": right}))
        except BadInput:
            outcomes.append(None)
    assert outcomes[0] == outcomes[1]
    if operator in ("==", "!="):
        is_equal = json.dumps(left) == json.dumps(right) or (
            left == right and isinstance(left, bool) == isinstance(right, bool)
        )
        assert outcomes[0] == (is_equal == (operator == "=="))


def test_skipped_value_equals_null_and_has_no_order() -> None:
    for operator, holds in (("==", True), ("!=", False), ("<", False), (">=", False)):
        assert parse_condition(f"$a {operator} null").holds({"a": MISSING}) is holds


ROOT = Path(__file__).parents[2]
FILE = {"type": "string", "format": "uri"}
SHIPPED = (
    class_entry(
        "safety",
        {"image": FILE},
        {
            "type": "object",
            "properties": {"nsfw": {"type": "number"}, "is_safe": {"type": "boolean"}},
        },
    ),
    class_entry(
        "pages",
        {"document": FILE, "pages": {"type": "string"}},
        {
            "type": "object",
            "properties": {
                "pages": {"type": "array", "items": FILE},
                "numbers": {"type": "array", "items": {"type": "integer"}},
                "size_bytes": {"type": "integer"},
            },
        },
    ),
    class_entry(
        "ocr",
        {
            "document": FILE,
            "table_format": {"type": "string", "enum": ["", "markdown", "html"], "default": ""},
            "include_image_base64": {"type": "boolean", "default": False},
            "image_limit": {"type": "integer", "minimum": 0, "default": 10000},
            "image_min_size": {"type": "integer", "minimum": 1, "default": 16},
            "include_blocks": {"type": "boolean", "default": False},
            "confidence_scores_granularity": {
                "type": "string",
                "enum": ["", "page", "block", "word"],
                "default": "",
            },
            "extract_header": {"type": "boolean", "default": False},
            "extract_footer": {"type": "boolean", "default": False},
        },
        {"type": "array", "items": {"type": "object"}},
    ),
    class_entry("transcribe", {"file": FILE}, {"type": "array", "items": {"type": "object"}}),
    class_entry(
        "passages",
        {
            "document": {"type": "object"},
            "max_chars": {"type": "integer", "minimum": 1, "default": 800},
        },
        {"type": "array", "items": {"type": "object"}},
    ),
    class_entry(
        "transcript-text",
        {"segments": {"type": "array", "items": {"type": "object"}}},
        {"type": "string"},
    ),
    class_entry(
        "speech",
        {
            "input": {"type": "string", "minLength": 1, "maxLength": 4096},
            "response_format": {"type": "string", "enum": ["mp3", "opus", "flac", "wav", "pcm"]},
        },
        {"type": "array", "items": FILE},
    ),
    class_entry(
        "upscale", {"image": FILE, "scale": {"type": "number", "minimum": 1, "maximum": 4}}, FILE
    ),
)
"""The inputs and outputs of the classes in the folders with these names, as generated by cog."""


def test_shipped_flows_fit_their_models() -> None:
    writer = CATALOG.default("text").model_copy(update={"name": "smollm2-135m"})
    models = (*read_catalog(ROOT / "models.yaml").models, writer, *SHIPPED)
    entries = [
        FlowEntry.model_validate(entry)
        for path in sorted((ROOT / "examples/flows").glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text())["flows"]
    ]
    flows = [flow_of(entry, Catalog(models)) for entry in entries]
    names = ["draw-checked", "ocr-pages", "read-and-index", "spoken-answer"]
    assert [flow.name for flow in flows] == names
    assert flows[1].api == "ocr"
    assert flows[0].interface is not None
    assert flows[0].interface.output["properties"]["is_safe"] == {"type": "boolean"}
    assert flows[2].interface is not None
    vectors = flows[2].interface.output["properties"]["vectors"]
    assert vectors["items"] == {"type": "array", "items": {"type": "number"}}
    assert flows[3].interface is not None
    assert flows[3].interface.output["properties"]["speech"]["anyOf"][0]["items"] == FILE
