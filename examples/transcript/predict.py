"""Puts what was said in the windows of a recording into one transcript."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cog import BasePredictor, Input
from transcript import Transcript


class InvalidInput(ValueError):
    """An input that this model can't use. `field` is its name."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class Predictor(BasePredictor):
    """Joins the answers of examples/transcribe for the windows of examples/windows."""

    def predict(
        self,
        windows: dict[str, Any] = Input(
            description="Of each window in order its `segments`, and its places: `parts`."
        ),
        duration: float = Input(description="Of the recording, in seconds.", ge=0),
    ) -> Iterator[dict[str, Any]]:
        """Yields the segments as examples/transcribe does for the whole recording.

        A recording has the language of its first segment.
        """
        transcript = Transcript(duration)
        try:
            for said, places in zip(windows["segments"], windows["parts"], strict=True):
                yield from transcript.add(said, places)
            yield from transcript.finish()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = "must be the answers of examples/windows and examples/transcribe"
            raise InvalidInput("windows", reason) from error
