"""Joins the transcripts of a recording's windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cog import BasePredictor, Input
from transcript import Transcript


class InvalidInput(ValueError):
    """An invalid input. `field` is its name."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class Predictor(BasePredictor):
    """Joins the outputs of examples/transcribe for the windows of examples/windows."""

    def predict(
        self,
        windows: dict[str, Any] = Input(
            description="For each window in order, its `segments` and its positions: `parts`."
        ),
        duration: float = Input(description="Duration of the recording, in seconds.", ge=0),
    ) -> Iterator[dict[str, Any]]:
        """Yields the same segments as examples/transcribe for the whole recording.

        The language of the first segment applies to the whole recording.
        """
        transcript = Transcript(duration)
        try:
            for segments, places in zip(windows["segments"], windows["parts"], strict=True):
                yield from transcript.add(segments, places)
            yield from transcript.finish()
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            reason = "must be outputs of examples/windows and examples/transcribe"
            raise InvalidInput("windows", reason) from error
