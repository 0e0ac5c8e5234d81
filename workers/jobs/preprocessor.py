"""Prepares jobs' inputs for the model: object store sources, tokens, templates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from shared.errors import ModelFailed, PenstockError
from shared.messages import Item
from shared.models.blob import Blob
from shared.models.tasks import Input
from shared.models.tasks.embedding import TextToTokenize
from shared.stores.objects import ObjectStore
from workers.models.base import Prepared, Preparer, WithoutModel

_Ready = Prepared | WithoutModel | PenstockError
"""An item for the model, a result that needs no model, or the error for an invalid item."""
SOURCE_LIMIT_BYTES = 64 * 1024 * 1024
"""Maximum size of a source fetched from the object store."""

log = logging.getLogger(__name__)


class Preprocessor:
    """Prepares all items in a single call.

    Args:
        on_thread: True to prepare items on a thread, because preparation takes milliseconds.
    """

    def __init__(self, preparer: Preparer, objects: ObjectStore, *, on_thread: bool) -> None:
        self._preparer = preparer
        self._objects = objects
        self._on_thread = on_thread

    async def prepare(self, items: Sequence[Item]) -> list[_Ready]:
        """Returns one outcome per item, in order: the prepared item, or an error."""
        loaded: Sequence[Item | PenstockError] = items
        if any(item.input.sources for item in items):
            loaded = await asyncio.gather(*(self._with_sources(item) for item in items))
        is_long = any(isinstance(item.input, TextToTokenize) for item in items)
        return (
            await asyncio.to_thread(self._prepare, loaded)
            if self._on_thread or is_long
            else self._prepare(loaded)
        )

    async def _with_sources(self, item: Item) -> Item | PenstockError:
        """Returns `item` with its sources inlined, or the reason they can't be read."""
        if not any(source.object_key for source in item.input.sources):
            return item
        try:
            inline = [await self._inline(source) for source in item.input.sources]
        except PenstockError as error:
            return error
        return msgspec.structs.replace(item, input=item.input.with_sources(inline))

    async def _inline(self, source: Blob) -> Blob:
        if source.object_key is None:
            return source
        data = await self._objects.get(source.object_key, SOURCE_LIMIT_BYTES)
        return Blob(source.media_type, data=data)

    def _prepare(self, items: Sequence[Item | PenstockError]) -> list[_Ready]:
        prepared = iter(
            self._prepare_inputs([item.input for item in items if isinstance(item, Item)])
        )
        return [next(prepared) if isinstance(item, Item) else item for item in items]

    def _prepare_inputs(self, inputs: Sequence[Input]) -> Sequence[_Ready]:
        try:
            return self._preparer.prepare(inputs)
        except Exception:
            # This is the boundary with tokenizers and templates. An input that crashes one of them
            # fails on its own. Otherwise, it would kill this worker and the next one to get the
            # job.
            if len(inputs) > 1:
                return [ready for value in inputs for ready in self._prepare_inputs([value])]
            log.warning("input not prepared", exc_info=True)
            return [ModelFailed("the input could not be prepared")]
