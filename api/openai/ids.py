"""The ids of chats, completions and responses: a prefix of OpenAI's, and 24 hexadecimal digits.

The digits are those of the prediction, if the answer is one, and otherwise those of the request. So
an id has the same form however the answer was asked for, and a stored one is found by its id.
"""

from __future__ import annotations

CHAT, COMPLETION, RESPONSE = "chatcmpl-", "cmpl-", "resp_"


def answer_id(prefix: str, own_id: str) -> str:
    """Returns the id of an answer. `own_id`: of its prediction or of its request."""
    return prefix + own_id.partition("_")[2]
