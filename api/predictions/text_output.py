"""The events of a prediction whose output is a text, as Replicate's clients read them.

An `output` event has what the text has more than before. The text is all of them, one after
another.
"""

from __future__ import annotations

from collections.abc import Sequence

from api.predictions.event_stream import encode_event, failure_event
from shared.messages import ItemOutcome
from shared.tasks.text import GenerationResult, TokenLogprob


class OutputEvents:
    """The events of one text. The stream puts their ids before them."""

    def opening(self, index: int) -> None:
        """Nothing: an output begins with its text."""

    def delta(
        self,
        index: int,
        before: str,
        text: str,
        logprobs: Sequence[TokenLogprob],
        at: tuple[int, int],
    ) -> bytes | None:
        """More of the text."""
        return encode_event("output", text) if text else None

    def ending(self, index: int, result: GenerationResult) -> list[bytes]:
        """Nothing: a text ends with its prediction."""
        return []

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        """The end."""
        return [encode_event("done", "{}")]

    def failure(self, code: str, message: str) -> bytes:
        """Why there is no more text, and the end. A canceled prediction is no error."""
        if code == "canceled":
            return encode_event("done", '{"reason":"canceled"}')
        return failure_event(message)
