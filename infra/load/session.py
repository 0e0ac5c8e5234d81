"""Runs a replay from its first request to the summary, and stops it in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any

import uvloop

from infra.load.ledger import LedgerHead, opened_ledger
from infra.load.plan import LoadPlan
from infra.load.progress import shown_progress
from infra.load.replay import Pace, Replay
from infra.load.target import Target
from shared.errors import Unavailable


def replay(
    target: Target, plan: LoadPlan, pace: Pace, *, run: str, seed: int, path: Path
) -> dict[str, Any]:
    """Sends everything, and returns the summary. SIGINT and SIGTERM stop it in order.

    Args:
        target: whom to ask.
        plan: what is sent.
        pace: how fast.
        run: the start of the id of each request.
        seed: of inputs that are made.
        path: of the ledger, a new file.

    Raises:
        ConfigurationError: the ledger can't be written.
        Unavailable: nothing listens at the target.
    """
    return uvloop.run(_replay(target, plan, pace, run=run, seed=seed, path=path))


async def _replay(
    target: Target, plan: LoadPlan, pace: Pace, *, run: str, seed: int, path: Path
) -> dict[str, Any]:
    head = LedgerHead(run, target.url, time())
    with opened_ledger(path, head) as ledger, shown_progress(len(plan.arrivals)) as show:
        one = Replay(
            target,
            run,
            plan.arrivals,
            plan.forms,
            pace,
            seed=seed,
            ledger=ledger,
            show=show,
        )
        was_stopped = asyncio.Event()

        def stop() -> None:
            was_stopped.set()
            one.stop()

        with _stopped_by_signals(stop):
            try:
                await one.run()
            except OSError as error:
                raise Unavailable(f"{target.url}: {error}") from error
    return {
        "run": run,
        "ledger": str(path),
        "was_stopped": was_stopped.is_set(),
        **one.tally.summary(one.took_s),
    }


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
