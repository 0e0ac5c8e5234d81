"""What people see of items that are computed step by step: progress, and pictures if they watch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from workers.models.base import Picture, ProgressTeller
from workers.runtime.batch_execution import (
    FIRST_PREVIEW_S,
    MOST_PREVIEWED,
    PREVIEW_EVERY_S,
    PREVIEW_SHARE,
    PROGRESS_EVERY_S,
    WATCH_VALID_S,
)
from workers.runtime.protocol import ItemPicture, ItemsProgress, ServerMessage

log = logging.getLogger(__name__)


class StepPictures:
    """Tells the I/O process between two steps how far the items of batch `number` are.

    Args:
        model: that computes them.
        number: of the batch.
        send: sends a message.
    """

    def __init__(
        self, model: ProgressTeller, number: int, send: Callable[[ServerMessage], None]
    ) -> None:
        self._model = model
        self._number = number
        self._send = send
        self._told_s = time.monotonic()
        self._preview_from_s = self._told_s + FIRST_PREVIEW_S
        self._watched: set[int] = set()
        self._watched_until_s = 0.0

    def watch(self, places: Sequence[int]) -> None:
        """Somebody watches these places for a moment."""
        self._watched = set(places)
        self._watched_until_s = time.monotonic() + WATCH_VALID_S

    def tell(self) -> None:
        """Tells the progress and draws pictures, if it is time for them."""
        now_s = time.monotonic()
        if now_s - self._told_s < PROGRESS_EVERY_S:
            return
        progress = self._model.progress()
        if progress:
            self._told_s = now_s
            self._send(ItemsProgress(self._number, progress))
        if self._watched and self._preview_from_s <= now_s < self._watched_until_s:
            self._draw(progress, now_s)

    def _draw(self, progress: dict[int, tuple[int, int]], began_s: float) -> None:
        for place in sorted(self._watched & progress.keys())[:MOST_PREVIEWED]:
            picture = self._drawn(place)
            if picture is not None:
                self._send(ItemPicture(self._number, place, *progress[place], picture))
        took_s = time.monotonic() - began_s
        self._preview_from_s = max(
            self._preview_from_s, began_s + max(PREVIEW_EVERY_S, took_s / PREVIEW_SHARE)
        )

    def _drawn(self, place: int) -> Picture | None:
        try:
            return self._model.picture(place)
        except Exception:
            # The boundary to the model libraries: a picture that nobody needs never fails an item.
            log.warning("no preview could be drawn", exc_info=True)
            self._preview_from_s = float("inf")
            return None
