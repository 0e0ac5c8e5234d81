"""Gives the text of a transcript, for models that read texts."""

from __future__ import annotations

from typing import Any

from cog import BasePredictor, Input


class Predictor(BasePredictor):
    """Joins the texts of segments, as `text` of OpenAI's transcriptions has them."""

    def predict(
        self,
        segments: list[dict[str, Any]] = Input(
            description="What examples/transcribe gives: each has its `text`, with its spaces."
        ),
    ) -> str:
        """Returns the text, without spaces around it. Empty: nobody speaks."""
        return "".join(one["text"] for one in segments).strip()
