"""Continuous batching of images: they come between two denoise steps, and leave when done."""

from __future__ import annotations

import torch

from shared.catalog import Model
from shared.errors import PenstockError
from shared.tasks.text import TokenChunk
from workers.models.base import OutOfMemory, PreparedImage, PreparedItem, StepEnd
from workers.models.image.model import ImageModel


class SteppedImageModel(ImageModel):
    """An ImageModel that also computes step by step. See SteppedModel."""

    draws_masks = True
    takes_adapters = True
    takes_guides = True

    def use(self, entry: Model, *, is_trial: bool = False) -> None:
        super().use(entry, is_trial=is_trial)
        self._queued: dict[int, PreparedImage] = {}
        """Those that wait until the one before has ended, if images are drawn one at a time."""

    def admit(self, slot: int, item: PreparedItem) -> None:
        """Takes an item in. It begins at the next step, or once its adapter is read."""
        assert isinstance(item, PreparedImage), "the preparer of images makes them; this is a bug"
        if (refusal := self.refusal(item)) is not None:
            raise refusal
        if not self.adapters.holds_back(slot, item):
            self._begin_stepping(slot, item)

    def drop(self, slot: int) -> None:
        self._queued.pop(slot, None)
        super().drop(slot)

    def _begin_stepping(self, slot: int, item: PreparedImage) -> None:
        if self.runs_alone and self._drawings:
            self._queued[slot] = item
            return
        with torch.inference_mode(), self.settled():
            self._begin(slot, item)

    def step(self) -> StepEnd:
        """One denoise step of each item. Those that are done are decoded."""
        end = StepEnd()
        self._end_waits(end)
        if not self._drawings and not self._encoding:
            self.adapters.pause()
            return end
        # Their files are made on threads, which takes nothing of the step.
        end.waiting += self._encoding
        oldest = next(iter(self._drawings), None)
        with torch.inference_mode(), self.settled():
            outcomes = self._advance()
        end.work = sum(owner.pixels * rows for owner, rows in self._hub.work)
        for slot, outcome in outcomes.items():
            # With others gone, there may be room for it. For the oldest one there is none.
            if isinstance(outcome, OutOfMemory) and slot != oldest:
                end.preempted.append(slot)
            else:
                end.results[slot] = outcome
        return end

    def _end_waits(self, end: StepEnd) -> None:
        """Begins the items whose adapters are there by now. Ends those whose adapters failed."""
        in_use = {drawing.item.adapter for drawing in self._drawings.values()}
        for slot, item in self.adapters.take_ready(in_use):
            try:
                if isinstance(item, PenstockError):
                    raise item
                self._begin_stepping(slot, item)
            except PenstockError as error:
                end.waiting.append(slot)
                if isinstance(error, OutOfMemory) and self._drawings:
                    end.preempted.append(slot)
                else:
                    end.results[slot] = error
        if self._queued and not self._drawings:
            slot = next(iter(self._queued))
            self._begin_stepping(slot, self._queued.pop(slot))
        end.waiting += [*self.adapters.waiting, *self._queued]

    def take_chunks(self) -> dict[int, TokenChunk]:
        """None: only texts have them."""
        return {}
