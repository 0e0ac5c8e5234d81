"""Requests to engines, their replies, and the ways their servers differ."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.models.catalog import Model
from workers.models.base import PreparedPrompt
from workers.models.engines.engine_http import EngineResponse
from workers.models.generation.vocabulary import Vocabulary

CUT = "the stream ended before the text was complete"
Post = Callable[[str, Mapping[str, Any]], AbstractAsyncContextManager[EngineResponse]]
"""Called as post(path, body). Leaving the context stops the computation."""
TakeEvents = Callable[[list[bytes]], bool]
"""Called with the data of events that arrived together. Returns True if no more are needed."""
_LAST_EVENT = b"data: [DONE]"
Chances = Mapping[int, float]
"""Log probabilities by token, for the chosen token and the most likely ones."""


@dataclass(frozen=True)
class Hardware:
    """An engine's hardware. `device`: `cpu`, `cuda`, or `cuda:N`, the first of the entry's GPUs.

    `threads`: number of threads on a CPU. `memory_fraction`: the fraction of a GPU's memory that
    the engine may use.
    """

    device: str
    threads: int
    memory_fraction: float = 1.0


@dataclass(frozen=True)
class Launch:
    """How to start an engine's server.

    `settings`: for workers/models/engines/program.py, except socket and key. `environment`: added
        to the few variables that the server gets. `context_keys`: where to find the maximum number
        of tokens per text in the document at `context_path`. `safe_lines`: log lines from a ready
        server that operators may read, because they can't contain a prompt. `has_metrics`: True if
        the server has Prometheus metrics at /metrics. `causes`: log lines that contain the reason
        for a failed start, because the log may end with something else.
    """

    settings: Mapping[str, Any]
    context_path: str
    context_keys: Sequence[str | int]
    safe_lines: re.Pattern[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    has_metrics: bool = False
    causes: re.Pattern[str] | None = None


@dataclass(frozen=True)
class EngineRequest:
    """A request to the engine: the tokens to read, and how many tokens to generate after them.

    `slot`, `salt`: only requests with the same slot, or the same salt, share the results for
        identical prefixes. `keeps`: True if the slot keeps its results for reuse with the same
        tokens. `counts`: True if the engine must report the number of cached tokens. `echoes`: True
        if the engine must report the prompt's log probabilities. `bias`: added to the tokens'
        logits, in place of the item's own bias. `allowed`: a mask of the tokens to choose from.
    """

    ids: Sequence[int]
    slot: int
    salt: str
    keeps: bool
    tokens: int = 0
    counts: bool = True
    echoes: bool = False
    bias: Mapping[int, float] | None = None
    allowed: NDArray[np.bool_] | None = None


class Reply(msgspec.Struct):
    """A reply, or part of a stream.

    `chances`: log probabilities for each token, if they were requested. `prompt_chances`: the same
        for each prompt token, with None for the first one. `cached_tokens`: number of prompt tokens
        that had been computed earlier, or None if not reported. `has_ended`: True if the engine
        reached the end of the text. `has_lost`: True if some tokens are missing.
    """

    tokens: Sequence[int] = ()
    chances: Sequence[Chances] = ()
    prompt_chances: Sequence[Chances | None] = ()
    cached_tokens: int | None = None
    has_ended: bool = False
    has_lost: bool = False

    @property
    def is_written(self) -> bool:
        """True if the reply contains more than a report about the prompt."""
        return bool(self.tokens) or self.has_ended or self.has_lost


TakeReplies = Callable[[Sequence[Reply]], bool]
"""Called with replies that arrived together. Returns True if no more are needed."""


class EngineDialect(ABC):
    """One kind of engine: starts its server, and speaks its protocol.

    Requests contain only token IDs, and set every sampling field, because the defaults are not
    neutral.

    Args:
        adapters: each adapter's file or folder, by name.
    """

    mixes_adapters: ClassVar[bool]
    """True if the engine computes texts with different adapters together."""

    def __init__(
        self,
        entry: Model,
        vocabulary: Vocabulary,
        adapters: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        self.entry = entry
        self.vocabulary = vocabulary
        self.adapters = adapters

    @property
    def folder(self) -> Path:
        return self.vocabulary.folder

    @abstractmethod
    def launch(self, hardware: Hardware) -> Launch:
        """Returns how to start the engine's server.

        Raises:
            ConfigurationError: the engine can't run this model, or is not installed.
        """

    def part_tokens(self, hardware: Hardware) -> int:
        """Returns the number of prompt tokens that the engine reads at a time."""
        return self.entry.generation.chunk_tokens

    @abstractmethod
    def can_stream(self, item: PreparedPrompt, *, has_written: bool) -> bool:
        """Returns whether the engine can stream the rest of a text exactly as requested.

        Args:
            has_written: True if the text has tokens from an earlier request.
        """

    @abstractmethod
    async def ask(self, post: Post, item: PreparedPrompt, request: EngineRequest) -> Reply:
        """Reads and generates tokens. Does not apply the item's schema or penalties.

        Raises:
            PenstockError: there is no reply.
        """

    @abstractmethod
    async def stream(
        self, post: Post, item: PreparedPrompt, request: EngineRequest, take: TakeReplies
    ) -> None:
        """Generates the rest of a text, until it is complete or `take` returns True.

        Args:
            take: called with replies that arrived together.

        Raises:
            ConnectionError: the stream ended before the text did.
            PenstockError: there was no reply, or `take` raised it.
        """


async def follow_events(response: EngineResponse, take: TakeEvents) -> bool:
    """Passes a response's server-sent events to `take` until the response ends or it returns True.

    Returns whether `take` returned True.

    Raises:
        OSError: the connection was lost before the response's end.
        Exception: `take` raised it.
    """
    rest = b""

    def take_part(part: bytes) -> bool:
        nonlocal rest
        *lines, rest = (rest + part).split(b"\n")
        events = [
            line.partition(b": ")[2]
            for line in lines
            if line.startswith((b"data: ", b"error: ")) and line != _LAST_EVENT
        ]
        return bool(events) and take(events)

    return await response.follow(take_part)
