"""Fetches source images and prepares the inputs of items for the model, before they are queued."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from shared.blob import Blob
from shared.errors import ModelFailed, PenstockError
from shared.messages import Item
from shared.stores.objects import ObjectStore
from shared.tasks import Input
from workers.models.base import Prepared, Preparer

SOURCE_LIMIT_BYTES = 32 * 1024 * 1024
"""The largest source image that is fetched from the object store."""

log = logging.getLogger(__name__)


class Preprocessor:
    """Prepares all items of a call together.

    Args:
        preparer: prepares the model's inputs.
        objects: has large source images.
        on_thread: whether to prepare on a thread, because it takes milliseconds.
    """

    def __init__(self, preparer: Preparer, objects: ObjectStore, *, on_thread: bool) -> None:
        self._preparer = preparer
        self._objects = objects
        self._on_thread = on_thread

    async def prepare(self, items: Sequence[Item]) -> list[Prepared | PenstockError]:
        """One outcome per item, in order: the prepared item, or an error."""
        found: Sequence[Item | PenstockError] = items
        if any(item.input.source is not None for item in items):
            found = await asyncio.gather(*(self._with_source(item) for item in items))
        return (
            await asyncio.to_thread(self._prepare, found)
            if self._on_thread
            else self._prepare(found)
        )

    async def _with_source(self, item: Item) -> Item | PenstockError:
        """`item` with its source image inline."""
        source = item.input.source
        if source is None or source.object_key is None:
            return item
        try:
            data = await self._objects.get(source.object_key, SOURCE_LIMIT_BYTES)
        except PenstockError as error:
            return error
        inline = Blob(source.media_type, data=data)
        return msgspec.structs.replace(item, input=item.input.with_source(inline))

    def _prepare(self, items: Sequence[Item | PenstockError]) -> list[Prepared | PenstockError]:
        prepared = iter(
            self._prepare_inputs([item.input for item in items if isinstance(item, Item)])
        )
        return [next(prepared) if isinstance(item, Item) else item for item in items]

    def _prepare_inputs(self, inputs: Sequence[Input]) -> Sequence[Prepared | PenstockError]:
        try:
            return self._preparer.prepare(inputs)
        except Exception:
            # The boundary to tokenizers and templates. What one of them can't bear fails alone:
            # otherwise the worker would end, and so would the next ones that get the job.
            if len(inputs) > 1:
                return [one for given in inputs for one in self._prepare_inputs([given])]
            log.warning("input not prepared", exc_info=True)
            return [ModelFailed("the input could not be prepared")]
