"""Finds stored chats and responses by their ids."""

from __future__ import annotations

import re

from api.errors import NotFound
from api.http.request import ApiRequest
from api.openai.ids import CHAT, RESPONSE
from api.predictions.creation import PredictionSnapshot

_DIGITS = re.compile(r"[0-9a-f]{24}")
_NAMES = {CHAT: "Chat completion", RESPONSE: "Response"}


async def find_stored(
    call: ApiRequest, prefix: str, endpoint: str, shown: str
) -> PredictionSnapshot:
    """Returns the prediction of an answer of the tenant.

    Args:
        call: the authenticated request.
        prefix: of ids of such answers.
        endpoint: the path that creates such answers.
        shown: the id, as the caller has it.

    Raises:
        NotFound: the tenant has no such answer, or it has expired.
        Forbidden: the key may not do this with results of that endpoint or model.
        Unavailable: Redis is out of reach.
    """
    digits = shown.removeprefix(prefix)
    if shown.startswith(prefix) and _DIGITS.fullmatch(digits):
        try:
            snapshot = await call.prediction(f"pred_{digits}")
        except NotFound:
            pass
        else:
            if snapshot.prediction.endpoint == endpoint:
                return snapshot
    raise not_found(prefix, shown)


def not_found(prefix: str, shown: str) -> NotFound:
    """Returns the error for an answer that is not there, in OpenAI's words."""
    return NotFound(f"{_NAMES[prefix]} with id '{shown[:80]}' not found.")
