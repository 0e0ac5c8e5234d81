"""Looks up stored chats, stored responses, and response items by ID."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from api.errors import NotFound
from api.http.call import Call
from api.http.recording import Recording
from api.openai.generation import CHAT_PREFIX, RESPONSE_PREFIX, answer_id
from api.openai.response_events import ResponseEvents
from api.openai.responses_schemas import ResponseBody, ResponseReply
from api.predictions.creation import PredictionSnapshot
from shared.errors import BadInput
from shared.models.catalog import Catalog
from shared.predictions import read_ended_at_s

PATH_OF_RESPONSES = "/v1/responses"
MAX_REFERENCED = 64
"""Maximum number of responses that one request may reference."""
_DIGITS = re.compile(r"[0-9a-f]{24}")
_OUTPUT_ITEM = re.compile(r"(?:msg|fc)_([0-9a-f]{24})(?:_\d{1,4})?")
_NAMES = {CHAT_PREFIX: "Chat completion", RESPONSE_PREFIX: "Response"}
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


async def find_stored(
    call: Call, prefix: str, endpoint: str, public_id: str, recording: Recording
) -> PredictionSnapshot:
    """Returns the prediction that stores one of the tenant's responses.

    Args:
        prefix: prefix of the response's ID.
        endpoint: the path that creates such responses.
        public_id: the ID as sent by the caller.

    Raises:
        NotFound: the tenant has no such response, or it has expired.
        Forbidden: the key may not do this with results of that endpoint or model.
    """
    digits = public_id.removeprefix(prefix)
    if public_id.startswith(prefix) and _DIGITS.fullmatch(digits):
        try:
            snapshot = await recording.find(call, f"pred_{digits}")
        except NotFound:
            pass
        else:
            if snapshot.prediction.endpoint == endpoint:
                return snapshot
    raise not_found(prefix, public_id)


def not_found(prefix: str, public_id: str) -> NotFound:
    """Returns the error for a response that does not exist, worded like OpenAI's."""
    return NotFound(f"{_NAMES[prefix]} with id '{public_id[:80]}' not found.")


async def find_response(
    call: Call, response_id: str, recording: Recording, *, is_resumed: bool = False
) -> PredictionSnapshot:
    """Returns one of the tenant's stored responses.

    Args:
        is_resumed: True if its stream is being resumed, which does not require `store`.

    Raises:
        NotFound: the response does not exist or was not stored.
        Forbidden: the key may not do this with responses or with this model.
    """
    snapshot = await find_stored(call, RESPONSE_PREFIX, PATH_OF_RESPONSES, response_id, recording)
    if snapshot.prediction.input.get("store") is False and not is_resumed:
        raise not_found(RESPONSE_PREFIX, response_id)
    return snapshot


def response_of(
    call: Call, snapshot: PredictionSnapshot, catalog: Catalog, after: int = -1
) -> tuple[ResponseBody, ResponseEvents]:
    """Returns a response's request, and its events after number `after`."""
    prediction = snapshot.prediction
    model = catalog.find(prediction.model)
    call.use(model)
    body = ResponseBody.model_validate(prediction.input)
    response_id = answer_id(RESPONSE_PREFIX, prediction.id)
    return body, ResponseEvents(body, response_id, prediction.created_at_s, model, after)


def state_of(call: Call, snapshot: PredictionSnapshot, catalog: Catalog) -> ResponseReply:
    """Returns a response's state as of now."""
    record = snapshot.record
    _, events = response_of(call, snapshot, catalog)
    if record.state == "succeeded" and record.reply is not None:
        return events.whole(record.reply.outcomes, read_ended_at_s(record))
    if not record.is_over:
        return events.reply("queued" if record.state == "starting" else "in_progress")
    return events.build_failed(snapshot.failure)


async def read_referenced_items(
    call: Call, names: Sequence[str], catalog: Catalog, recording: Recording
) -> dict[str, dict[str, Any]]:
    """Returns items from stored responses, keyed by ID.

    Raises:
        NotFound: one of the items does not exist. `field` is "input".
        BadInput: the items are from more than MAX_REFERENCED responses. `field` is "input".
    """
    items: dict[str, dict[str, Any]] = {}
    responses = set[str]()
    for name in names:
        if name in items:
            continue
        match = _OUTPUT_ITEM.fullmatch(name)
        if match is None:
            raise _no_item(name)
        responses.add(match[1])
        if len(responses) > MAX_REFERENCED:
            raise BadInput(
                f"input: must reference items from at most {MAX_REFERENCED} responses",
                field="input",
            )
        try:
            snapshot = await find_response(call, RESPONSE_PREFIX + match[1], recording)
        except NotFound:
            raise _no_item(name) from None
        output = msgspec.to_builtins(state_of(call, snapshot, catalog).output)
        items |= {item["id"]: item for item in output}
        if name not in items:
            raise _no_item(name)
    return items


def _no_item(name: str) -> NotFound:
    return NotFound(
        f"Item with id '{name[:80]}' not found. Items are not stored when `store` is "
        "false. Send the item itself instead of a reference to it.",
        field="input",
    )


def format_items(items: Sequence[dict[str, Any]], digits: str) -> list[dict[str, Any]]:
    """Returns items in the item list format. Items without an ID are given one."""
    return [_format_item(item, f"{digits}_in{number}") for number, item in enumerate(items)]


def _format_item(item: dict[str, Any], suffix: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    base_fields = {
        "id": item.get("id") or f"{_PREFIXES.get(kind, 'msg')}_{suffix}",
        "type": kind,
        "status": item.get("status") or "completed",
    }
    rest = {name: value for name, value in item.items() if value is not None}
    if kind == "message":
        rest["content"] = _parts(item["content"], is_said=item["role"] == "assistant")
    if kind == "reasoning":
        rest.setdefault("summary", [])
    return rest | base_fields


def _parts(content: Any, *, is_said: bool) -> list[dict[str, Any]]:
    parts = [{"text": content}] if isinstance(content, str) else content
    if is_said:
        return [
            {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}
            for part in parts
        ]
    return [{"type": "input_text", "text": part["text"]} for part in parts]
