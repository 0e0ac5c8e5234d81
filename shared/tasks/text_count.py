"""Counting the tokens of a conversation or a prompt, as a text model would read them.

The worker that prepares prompts answers at once: no model runs, and it costs nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shared.catalog_entry import CatalogEntry
from shared.tasks.base import LinkTo, TaskInput, TaskResult, WorkBound

ID_BYTES = 4


class TextToCount(TaskInput, tag="text_to_count"):
    """The messages or the prompt whose tokens are counted. `wants_ids`: the ids are wanted too."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    prompt: str = ""
    wants_ids: bool = False

    def estimate_work(self) -> int:
        """None of what a model does."""
        return 0

    def bound_work(self, entry: CatalogEntry) -> WorkBound:
        """None: it costs nothing."""
        return WorkBound(0)

    def cache_form(self) -> tuple[object, ...]:
        """All fields, as JSON: the order of keys reaches the template."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return ("text_to_count", msgspec.json.encode(fields).decode())


class TokenCount(TaskResult, tag="token_count"):
    """The number of tokens, and their ids as little-endian uint32 if they were asked for."""

    count: int
    ids: bytes = b""

    @property
    def token_ids(self) -> list[int]:
        """The ids."""
        starts = range(0, len(self.ids), ID_BYTES)
        return [int.from_bytes(self.ids[at : at + ID_BYTES], "little") for at in starts]

    def to_output(self, media_type: str, link_to: LinkTo) -> Any:
        """The number."""
        return self.count
