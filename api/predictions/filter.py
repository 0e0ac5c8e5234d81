"""A filter for lists of predictions."""

from __future__ import annotations

import math
from typing import NamedTuple

from api.predictions.creation import PredictionSnapshot
from shared.stores.record_state import State


class PredictionFilter(NamedTuple):
    """Selects the predictions to list. By default, all of them."""

    model: str = ""
    """Model name in the catalog. Empty means all models."""
    status: State | None = None
    """None means all states."""
    key_id: str = ""
    """Public part of the API key that created the predictions. Empty means all keys."""
    after_s: float = -math.inf
    """Earliest creation time (inclusive), in Unix seconds."""
    before_s: float = math.inf
    """Latest creation time (exclusive), in Unix seconds."""

    def matches(self, snapshot: PredictionSnapshot) -> bool:
        """Returns whether to list this prediction, whose creation time is already in range."""
        prediction, record = snapshot
        return (
            self.model in ("", prediction.model)
            and self.status in (None, record.state)
            and self.key_id in ("", prediction.key_id)
        )
