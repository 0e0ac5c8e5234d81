"""Extracts a transcript's text, for models that read text."""

from __future__ import annotations

from typing import Any

from cog import BasePredictor, Input


class InvalidInput(ValueError):
    """An invalid input. `field` is its name."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class Predictor(BasePredictor):
    """Joins the texts of segments, like `text` in OpenAI's transcriptions."""

    def predict(
        self,
        segments: list[dict[str, Any]] = Input(
            description=(
                "The output of examples/transcribe: each segment has a `text` with its spaces."
            )
        ),
    ) -> str:
        """Returns the text, without surrounding spaces. Empty if there is no speech."""
        try:
            return "".join(segment["text"] for segment in segments).strip()
        except (LookupError, TypeError) as error:
            raise InvalidInput("segments", "each must have a `text`") from error
