"""A real request for each model that has a worker at all times, as a caller would send it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
import uuid
from typing import Any

from shared.catalog import Catalog, Model
from shared.errors import Unavailable
from shared.tasks.base import ExampleRequest


def smoke(url: str, key: str, catalog: Catalog) -> list[str]:
    """Sends a request for each model of `catalog` with replicas.min >= 1. Returns a line for each.

    Models that scale to zero are left out: their first answer waits for a GPU, which says nothing
    of the API.

    Raises:
        Unavailable: no answer in the model's deadline, or a wrong one.
    """
    _call(f"{url}/healthz", "", None, 10.0)
    asked = [model for model in catalog.models if model.replicas.min >= 1]
    return [f"{url} answers"] + [_ask(url, key, model) for model in asked]


def _ask(url: str, key: str, model: Model) -> str:
    # A text of its own, so that no cache answers in the place of a worker.
    text = f"smoke test {uuid.uuid4()}"
    try:
        return _ask_with(text, url, key, model)
    except (KeyError, IndexError, TypeError) as error:
        raise Unavailable(
            f"{url}: {model.name} gave an answer of another shape: {error!r}"
        ) from error


def _ask_with(text: str, url: str, key: str, model: Model) -> str:
    example = model.definition.example_request(model, text)
    answer = _call(f"{url}{example.path}", key, example, model.deadline.default_s)
    try:
        return f"{model.name}: {model.definition.describe_answer(model, answer)}"
    except ValueError as error:
        raise Unavailable(f"{url}: {model.name} gave {error}") from error


def _call(url: str, key: str, example: ExampleRequest | None, limit_s: float) -> Any:
    headers = {"content-type": "application/json"} | (
        {"authorization": f"Bearer {key}"} if key else {}
    )
    body = None
    if example is not None:
        headers |= example.headers
        body = json.dumps(example.body).encode()
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=limit_s + 10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise Unavailable(
                f"{url}: {error.code} {error.read(500).decode(errors='replace')}"
            ) from error
    except (OSError, ValueError) as error:
        raise Unavailable(f"{url}: {error}") from error
