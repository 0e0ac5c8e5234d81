"""Gives the text of a transcript, for models that read texts."""

from __future__ import annotations

from typing import Any

from cog import BasePredictor, Input


class InvalidInput(ValueError):
    """An input that this model can't use. `field` is its name."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class Predictor(BasePredictor):
    """Joins the texts of segments, as `text` of OpenAI's transcriptions has them."""

    def predict(
        self,
        segments: list[dict[str, Any]] = Input(
            description="What examples/transcribe gives: each has its `text`, with its spaces."
        ),
    ) -> str:
        """Returns the text, without spaces around it. Empty: nobody speaks."""
        try:
            return "".join(one["text"] for one in segments).strip()
        except (LookupError, TypeError) as error:
            raise InvalidInput("segments", "each must have a `text`") from error
