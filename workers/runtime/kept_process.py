"""Keeps a compute process alive by restarting it when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shared.errors import ConfigurationError, ModelFailed, PenstockError
from shared.process.concurrency import backoff
from workers.models.client import ModelProcessDied, ProcessClient

START_TRIES = 5
"""Number of consecutive failed restarts before giving up on the process."""
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 16.0

log = logging.getLogger(__name__)


class KeptProcess:
    """A process that is replaced when it dies."""

    def __init__(self, start: Callable[[], Awaitable[ProcessClient]]) -> None:
        self._start = start
        self._settled = asyncio.Event()
        self._failure: PenstockError | None = None
        self.client: ProcessClient | None = None
        """The current process, or the most recent one. None if no process has started yet."""

    async def ready(self) -> None:
        """Waits until the process can run a batch.

        Raises:
            PenstockError: the process could not be started or restarted.
        """
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    def up(self) -> ProcessClient:
        """Returns the process, if it can run a batch.

        Raises:
            ModelProcessDied: the process is not running.
        """
        if self.client is None or not self._settled.is_set():
            raise ModelProcessDied("the model process is not running")
        return self.client

    async def keep_alive(self) -> None:
        """Starts the process, and restarts it when it dies.

        Returns once the process can no longer be started.
        """
        try:
            await self._keep_alive()
        finally:
            self._failure = self._failure or ModelFailed("the model process is no longer restarted")
            self._settled.set()

    async def _keep_alive(self) -> None:
        failures, pauses = 0, backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while True:
            try:
                client = await self._start()
            except PenstockError as error:
                failures += 1
                if (
                    self.client is None
                    or isinstance(error, ConfigurationError)
                    or failures == START_TRIES
                ):
                    self._failure = error
                    return
                log.error(
                    "model process could not start",
                    extra={"reason": error.message, "try": failures},
                )
                await asyncio.sleep(next(pauses))
                continue
            failures, pauses = 0, backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
            self.client = client
            _log_ready(client)
            self._settled.set()
            reason = await client.serve(on_end=self._settled.clear)
            log.error("model process ended", extra={"reason": reason})


def _log_ready(client: ProcessClient) -> None:
    facts = client.facts
    log.info(
        "model process ready",
        extra={
            "pid": client.pid,
            "device": facts.device_name,
            "load_s": round(facts.load_s, 3),
            "warmup_s": round(facts.warmup_s, 3),
            "memory_bytes": facts.memory_bytes,
            "resident": client.residency.resident,
            "size_bytes": client.residency.size_bytes,
        },
    )
