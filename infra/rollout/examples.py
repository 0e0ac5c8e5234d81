"""A small example request for each model, as a caller might send it, and its expected response."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shared.models.catalog import Model
from shared.models.tasks.custom import CUSTOM, interface_of
from shared.models.tasks.embedding import EMBEDDING
from shared.models.tasks.image import IMAGE
from shared.models.tasks.similarity import SIMILARITY
from shared.models.tasks.text import TEXT


@dataclass(frozen=True, kw_only=True)
class ExampleRequest:
    """A request that a caller could send, for smoke tests."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


class Example(NamedTuple):
    """An example for a task, for one of its models."""

    request: Callable[[Model, str], ExampleRequest]
    """Returns the request. The text makes it unique, so it is never served from a cache."""
    describe_answer: Callable[[Model, Any], str]
    """Describes the response in a few words.

    Raises ValueError with the reason if the response is wrong, and KeyError, IndexError or
    TypeError if its structure is different.
    """


def _request_vector(model: Model, text: str) -> ExampleRequest:
    return ExampleRequest(path="/v1/embeddings", body={"model": model.name, "input": text})


def _describe_vector(model: Model, answer: Any) -> str:
    vector = answer["data"][0]["embedding"]
    is_unit = math.isclose(math.hypot(*vector), 1.0, abs_tol=0.01)
    if len(vector) != model.dimensions or not is_unit:
        raise ValueError(f"not a unit vector: {len(vector)} numbers")
    return f"a unit vector of {len(vector)}"


def _request_image(model: Model, text: str) -> ExampleRequest:
    body = {"model": model.name, "prompt": text, "n": 1, "response_format": "b64_json"}
    return ExampleRequest(path="/v1/images/generations", body=body)


def _describe_image(model: Model, answer: Any) -> str:
    if not answer["data"][0]["b64_json"]:
        raise ValueError("not an image")
    return "an image"


def _request_scores(model: Model, text: str) -> ExampleRequest:
    """Returns a request to score two texts, one of which is the query itself."""
    return _predict(model, {"query": text, "texts": [text, "a cat on a mat"]})


def _describe_scores(model: Model, answer: Any) -> str:
    scores = answer["output"]
    if not scores or len(scores) != 2 or not 0.99 < scores[0] <= 1:
        raise ValueError(f"the output {scores} must be two scores, the first of them 1")
    return "two scores"


def _request_text(model: Model, text: str) -> ExampleRequest:
    """Returns a request with a question that has a short answer."""
    body = {
        "model": model.name,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "temperature": 0,
    }
    return ExampleRequest(path="/v1/chat/completions", body=body)


def _describe_text(model: Model, answer: Any) -> str:
    written = answer["usage"]["completion_tokens"]
    if not 1 <= written <= 8 or answer["choices"][0]["message"]["content"] is None:
        raise ValueError(f"expected 1 to 8 tokens, got {written}")
    return f"a text of {written} tokens"


def _request_output(model: Model, text: str) -> ExampleRequest:
    return _predict(model, interface_of(model).example_inputs(text))


def _describe_output(model: Model, answer: Any) -> str:
    if answer["status"] != "succeeded":
        raise ValueError(f"prediction {answer['status']}: {answer['error']}")
    return "an output"


def _predict(model: Model, inputs: Mapping[str, Any]) -> ExampleRequest:
    body = {"version": model.name, "input": inputs}
    return ExampleRequest(path="/v1/predictions", body=body, headers={"prefer": "wait"})


EXAMPLES = {
    EMBEDDING.name: Example(_request_vector, _describe_vector),
    IMAGE.name: Example(_request_image, _describe_image),
    SIMILARITY.name: Example(_request_scores, _describe_scores),
    TEXT.name: Example(_request_text, _describe_text),
    CUSTOM.name: Example(_request_output, _describe_output),
}
"""Examples by task name."""
