"""A step sends a model the same input as a prediction would, and gets its result as plain
values.
"""

from __future__ import annotations

import math
from typing import Any, cast

import msgspec
import pytest

from api.bodies import MAX_SEED
from api.tasks import API_TASKS
from shared.errors import BadInput
from shared.models.blob import Blob, content_digest
from shared.models.flow_types import check_values
from shared.models.image_entry import Adapter
from shared.models.tasks.base import MAX_STEP_SEED, StepInput, TaskInput
from shared.models.tasks.custom import CustomInput, CustomResult, FilePlace
from shared.models.tasks.embedding import EmbeddingResult
from shared.models.tasks.image import MAX_PROMPT_CHARS, ImageResult
from tests.api.harness import CATALOG
from tests.flows.models import STRING, class_entry

EMBED, DRAW = CATALOG.default("embedding"), CATALOG.default("image")
INK = {"ink": Adapter(source="local:ink.safetensors", scale=0.8)}
PAINT = DRAW.model_copy(update={"image": DRAW.image.model_copy(update={"adapters": INK})})
WRITE, COMPARE = CATALOG.default("text"), CATALOG.default("similarity")


async def of_prediction(entry: Any, values: dict[str, Any]) -> tuple[TaskInput, bool]:
    """The input as the API would send it, without files, and whether it may be cached."""
    nothing = cast(Any, None)
    read = await API_TASKS[entry.task].read(values, entry, nothing, nothing)
    return read.inputs[0], read.is_repeatable


def read_step(entry: Any, values: dict[str, Any]) -> StepInput:
    """Reads an item's values as the flow engine does."""
    inputs = entry.definition.step_schema(entry).inputs
    return cast(StepInput, entry.definition.step_input(entry, check_values(values, inputs)))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("entry", "values", "of_api"),
    [
        (EMBED, {"text": "a cat"}, {}),
        (EMBED, {"text": "a cat", "truncate": "end"}, {}),
        (COMPARE, {"text": "a cat", "query": "a dog"}, {"texts": ["a cat"], "text": None}),
        (WRITE, {"prompt": "a cat", "seed": 7}, {}),
        (WRITE, {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}, {}),
        (WRITE, {"prompt": "a", "seed": 1, "max_tokens": 9, "top_k": 3, "stop": ["."]}, {}),
        (WRITE, {"prompt": "a", "top_p": 0}, {}),
        (DRAW, {"prompt": "a cat", "seed": 7}, {}),
        (DRAW, {"prompt": "a", "seed": 1, "width": 64, "height": 128, "scheduler": "euler"}, {}),
        (DRAW, {"prompt": "a", "seed": 1, "num_inference_steps": 3, "guidance_scale": 1.5}, {}),
        (PAINT, {"prompt": "a", "seed": 1, "lora_weights": "ink"}, {}),
        (PAINT, {"prompt": "a", "seed": 1, "lora_weights": "ink", "lora_scale": -0.5}, {}),
    ],
)
async def test_step_gives_what_a_prediction_would(
    entry: Any, values: dict[str, Any], of_api: dict[str, Any]
) -> None:
    asked = {name: value for name, value in (values | of_api).items() if value is not None}
    expected, is_repeatable = await of_prediction(entry, asked)
    step = read_step(entry, values)
    # The step has no readers while it generates.
    assert step.input == (
        msgspec.structs.replace(expected, is_streamed=False)
        if hasattr(expected, "is_streamed")
        else expected
    )
    assert step.is_repeatable == is_repeatable


@pytest.mark.parametrize("entry", [EMBED, WRITE, DRAW], ids=lambda entry: str(entry.task))
def test_fields_of_a_step_are_those_of_a_prediction(entry: Any) -> None:
    fields = set(entry.definition.step_schema(entry).inputs["properties"])
    assert fields <= set(API_TASKS[entry.task].input_schema_of(entry)["properties"])


def test_bounds_are_those_of_the_api() -> None:
    assert MAX_STEP_SEED == MAX_SEED
    assert API_TASKS["image"].input_schema_of(DRAW)["properties"]["prompt"]["maxLength"] == (
        MAX_PROMPT_CHARS
    )


@pytest.mark.parametrize(
    ("entry", "values", "reason"),
    [
        (EMBED, {"text": ""}, "text: must have at least 1 characters"),
        (EMBED, {"text": None}, "text: must be text with at least one character"),
        (EMBED, {"text": "a", "truncate": "middle"}, 'truncate: must be one of "end", "start"'),
        (EMBED, {"text": "x" * (EMBED.text.max_input_bytes + 1)}, "text: must be at most"),
        (WRITE, {}, "send either prompt or messages"),
        (WRITE, {"prompt": "a", "max_tokens": 10**6}, "max_tokens: "),
        (WRITE, {"prompt": "a", "max_tokens": -1}, "max_tokens: must be at least 1, got -1"),
        (WRITE, {"prompt": "a", "max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        (WRITE, {"prompt": "a", "temperature": -5}, "temperature: must be at least 0, got -5"),
        (WRITE, {"prompt": "a", "temperature": math.nan}, "temperature: must be at least 0"),
        (WRITE, {"prompt": "a", "top_p": math.inf}, "top_p: must be at most 1"),
        (WRITE, {"prompt": "a", "top_k": -1}, "top_k: must be at least 0, got -1"),
        (WRITE, {"prompt": "a", "seed": -3}, "seed: must be at least 0, got -3"),
        (WRITE, {"prompt": "a", "seed": 2**70}, "seed: must be at most"),
        (WRITE, {"prompt": "a", "stop": ["x"] * 50}, "stop: must have at most 4 elements, got 50"),
        (WRITE, {"prompt": "a", "stop": ["x", ""]}, r"stop\[1\]: must have at least 1 characters"),
        (WRITE, {"messages": [5]}, r"messages\[0\]: must be an object, got a int"),
        (WRITE, {"messages": []}, "messages: must have at least 1 elements, got 0"),
        (DRAW, {"prompt": "a", "width": 63}, "width, height: "),
        (DRAW, {"prompt": "a", "width": 8192, "height": 8192}, "width, height: "),
        (DRAW, {"prompt": "a", "width": 0}, "width: must be at least"),
        (DRAW, {"prompt": "a", "height": -64}, "height: must be at least"),
        (DRAW, {"prompt": "a", "num_inference_steps": 10**6}, "num_inference_steps: must be at mo"),
        (DRAW, {"prompt": "a", "guidance_scale": math.nan}, "guidance_scale: must be at least 0"),
        (DRAW, {"prompt": "a", "seed": 2**70}, "seed: must be at most"),
        (DRAW, {"prompt": "a", "scheduler": "x"}, "scheduler: must be one of"),
        (DRAW, {"prompt": 7}, "prompt: must be a string, got a int"),
        (DRAW, {"prompt": None}, "prompt: must be text"),
    ],
)
def test_wrong_input_of_a_step_is_refused(entry: Any, values: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        read_step(entry, values)


@pytest.mark.parametrize(
    ("entry", "required"),
    [(EMBED, "text"), (WRITE, "prompt"), (PAINT, "prompt")],
    ids=lambda given: given if isinstance(given, str) else str(given.task),
)
def test_null_means_the_models_default(entry: Any, required: str) -> None:
    fields = dict.fromkeys(entry.definition.step_schema(entry).inputs["properties"])
    given = {required: "a cat"} | ({"seed": 7} if "seed" in fields else {})
    assert read_step(entry, fields | given) == read_step(entry, given)


@pytest.mark.parametrize("entry", [EMBED, WRITE, DRAW, COMPARE], ids=lambda one: str(one.task))
def test_bound_of_a_step_is_at_least_that_of_any_input(entry: Any) -> None:
    longest = {"text": "x" * 1000, "query": "y" * 1000, "prompt": "z" * 100, "seed": 1}
    fields = entry.definition.step_schema(entry).inputs["properties"]
    values = {name: value for name, value in longest.items() if name in fields}
    step = entry.definition.step_input(entry, values)
    assert entry.definition.step_bound(entry).work >= step.input.bound_work(entry).work


def test_files_travel_by_their_places() -> None:
    image = Blob("image/png", object_key="results/r/0")
    drawn = ImageResult(image, 8, 8, 1, 64)
    assert drawn.step_value() == image
    file = {"type": "string", "format": "uri"}
    entry = class_entry("look", {"image": file, "others": {"type": "array", "items": file}}, STRING)
    made = entry.definition.step_input(entry, {"image": image, "others": [image, image]}).input
    assert made == CustomInput(
        {"image": None, "others": [None, None]},
        [image] * 3,
        [
            FilePlace(["image"], "file.png"),
            FilePlace(["others", 0], "file.png"),
            FilePlace(["others", 1], "file.png"),
        ],
    )
    result = CustomResult({"pages": [{"n": 1}]}, [image], [FilePlace(["pages", 0, "image"])])
    result.output["pages"][0]["image"] = None
    assert result.step_value() == {"pages": [{"n": 1, "image": image}]}


def test_file_of_another_step_counts_by_its_bytes() -> None:
    """This way, an identical page in a different document is a cache hit."""
    file = {"type": "string", "format": "uri"}
    entry = class_entry("look", {"image": file}, STRING)
    stored = Blob("image/png", object_key="results/r/0", digest=content_digest(b"page"))
    forms = [
        entry.definition.step_input(entry, {"image": blob}).input.cache_form()
        for blob in (
            Blob("image/png", data=b"page"),
            stored,
            msgspec.structs.replace(stored, object_key="results/other/7"),
            Blob("image/png", object_key="results/r/0"),
        )
    ]
    assert forms[0] == forms[1] == forms[2] != forms[3]


def test_results_are_plain_values() -> None:
    assert EmbeddingResult(b"\0\0\x80\x3f\0\0\0\x40", 3).step_value() == [1.0, 2.0]
    assert CustomResult(["a", " cat"], streams="text").step_value() == "a cat"
    assert CustomResult([{"a": 1}], streams="items").step_value() == [{"a": 1}]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"prompt": {"a": 1}}, "prompt: must be a string, got an object"),
        ({"prompt": "a", "stop": "."}, "stop: must be a list, got a str"),
        ({"prompt": "a", "temperature": "hot"}, "temperature: must be a number, got a str"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens: must be an integer, got a bool"),
    ],
)
def test_a_value_of_another_type_than_its_step_declares_is_refused(
    values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadInput, match=reason):
        check_values(values, WRITE.definition.step_schema(WRITE).inputs)


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "a", "temperature": 1, "stop": ["."], "seed": None},
        {"messages": [{"role": "user", "content": "hello"}]},
    ],
)
def test_values_of_the_declared_types_are_taken(values: dict[str, Any]) -> None:
    check_values(values, WRITE.definition.step_schema(WRITE).inputs)
