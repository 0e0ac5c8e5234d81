"""Creates the request for an arrival: the route for its model's task, and a body."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock_load.day import Mix
from penstock_load.trace import Arrival
from shared.errors import BadInput
from shared.models.tasks.custom import CUSTOM
from shared.models.tasks.embedding import EMBEDDING
from shared.models.tasks.image import IMAGE
from shared.models.tasks.text import TEXT

_WORDS = """
river engine violin glacier market comet harbor orchard lantern meadow copper thunder window garden
signal bridge winter summer forest island planet circle square number letter paper stone metal water
fire cloud storm light shadow morning evening table chair house street city village road train ship
plane horse tiger eagle salmon apple lemon bread sugar coffee tea milk green yellow purple silver
golden quiet loud quick slow early late warm cold bright dark new old small large open closed first
last north south east west spring autumn doctor teacher farmer writer painter singer runner driver
sailor child friend family history science music
"""
WORDS = tuple(_WORDS.split())
COLORS, SHAPES = ("red", "green", "blue", "yellow", "white"), ("circle", "square", "triangle")
USUAL_WORDS = 12
ANSWER_TOKENS = 32
SEEDS = 2**31


class RequestForm(NamedTuple):
    """Route and bodies for a task."""

    path: str
    body: Callable[[Arrival, str], dict[str, Any]]
    """Creates the body for an arrival, from a text that identifies its group."""
    share: float
    """Default share of the day's requests, relative to the other models."""
    sizes: Mix
    """Default input sizes of a day."""
    items: Mix
    """Default numbers of items per request."""
    counts_input_once: bool = False
    """True if the response counts the items' shared input only once."""
    is_run: bool = False
    """True if the response is a prediction, which is polled until it finishes."""


def _texts(arrival: Arrival, group: str) -> dict[str, Any]:
    """Returns short queries, paragraphs or pages. The first word distinguishes groups and items."""
    texts = [
        arrival.input or _text(f"{group}.{item}", arrival.size or USUAL_WORDS)
        for item in range(arrival.items)
    ]
    model_input = texts if arrival.items > 1 else texts[0]
    return {"model": arrival.model, "input": model_input, "encoding_format": "base64"}


def _text(name: str, size: int) -> str:
    chance = random.Random(name)
    return " ".join([name, *chance.choices(WORDS, k=size - 1)])


def _image(arrival: Arrival, group: str) -> dict[str, Any]:
    digest = hashlib.blake2b(group.encode(), digest_size=8).digest()
    chance = random.Random(digest)
    color, ground = chance.sample(COLORS, 2)
    prompt = f"a large {color} {chance.choice(SHAPES)} on a {ground} background"
    body = {
        "model": arrival.model,
        "prompt": arrival.input or prompt,
        "n": arrival.items,
        "seed": int.from_bytes(digest[:4]) % SEEDS,
        "response_format": "b64_json",
    }
    return body | ({"num_inference_steps": arrival.size} if arrival.size else {})


def _chat(arrival: Arrival, group: str) -> dict[str, Any]:
    """Returns a question with this many words, and a limit that keeps the answer short."""
    question = arrival.input or _text(group, arrival.size or USUAL_WORDS)
    return {
        "model": arrival.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "n": arrival.items,
        "seed": int.from_bytes(hashlib.blake2b(group.encode(), digest_size=4).digest()) % SEEDS,
    }


def _prediction(arrival: Arrival, group: str) -> dict[str, Any]:
    """Returns the input in the trace, because classes and flows have custom inputs."""
    return {"version": arrival.model, "input": input_of(arrival)}


def input_of(arrival: Arrival) -> dict[str, Any]:
    """Returns a prediction's input.

    Raises:
        BadInput: the input is not a JSON object.
    """
    try:
        value = json.loads(arrival.input)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BadInput(
            f"input: {arrival.model} requires a JSON object with its inputs, as in POST "
            f"/v1/predictions; the trace has {arrival.input[:80]!r}",
            field="input",
        )
    return value


REQUEST_FORMS: Mapping[str, RequestForm] = {
    EMBEDDING.name: RequestForm(
        "/v1/embeddings",
        _texts,
        100.0,
        ((0.6, 5, 15), (0.3, 36, 88), (0.1, 150, 180)),
        ((0.95, 1, 1), (0.04, 2, 4), (0.01, 5, 16)),
    ),
    IMAGE.name: RequestForm(
        "/v1/images/generations", _image, 1.0, ((1.0, 0, 0),), ((0.9, 1, 1), (0.1, 2, 4))
    ),
    TEXT.name: RequestForm(
        "/v1/chat/completions",
        _chat,
        1.0,
        ((0.7, 5, 40), (0.3, 40, 120)),
        ((0.95, 1, 1), (0.05, 2, 2)),
        counts_input_once=True,
    ),
    CUSTOM.name: RequestForm(
        "/v1/predictions", _prediction, 1.0, ((1.0, 0, 0),), ((1.0, 1, 1),), is_run=True
    ),
}
"""Request forms, keyed by task name."""


def form_of(model: str, tasks: Mapping[str, str]) -> RequestForm:
    """Returns a model's request form.

    Args:
        tasks: the task of each served model.

    Raises:
        BadInput: the model is not served, or its task can't be replayed.
    """
    name = tasks.get(model)
    if name is None:
        known = ", ".join(tasks) or "none"
        raise BadInput(
            f"model: {model[:80]!r} is not served there; available models: {known}", field="model"
        )
    if not can_be_replayed(name):
        known = ", ".join(REQUEST_FORMS)
        raise BadInput(
            f"model: {model} has task {name}, which can't be replayed; supported tasks: {known}",
            field="model",
        )
    return REQUEST_FORMS[name]


def can_be_replayed(name: str) -> bool:
    """Returns whether requests for the task with this name can be sent."""
    return name in REQUEST_FORMS


def can_be_made_up(name: str) -> bool:
    """Returns whether inputs for the task with this name can be generated."""
    return can_be_replayed(name) and not REQUEST_FORMS[name].is_run
