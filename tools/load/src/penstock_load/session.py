"""Runs a replay from the first request to the summary, and stops it gracefully.

Progress is shown as a live table on a terminal, or otherwise as a line every LINE_EVERY_S seconds.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any

import uvloop
from rich.console import Console
from rich.live import Live
from rich.table import Table

from penstock_load.ledger import LedgerHead, open_ledger
from penstock_load.plan import LoadPlan
from penstock_load.replay import Pace, Replay, Show
from penstock_load.tally import ReplayProgress, Tally
from penstock_load.target import Target
from shared.errors import Unavailable

LINE_EVERY_S = 10.0


@contextmanager
def show_progress(total: int) -> Iterator[Show]:
    """Yields a function that reports progress to stderr.

    Args:
        total: number of requests in the whole replay.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield lambda look, tally: live.update(_table(look, tally, total))


class _Lines:
    def __init__(self) -> None:
        self._next_s = 0.0

    def __call__(self, look: ReplayProgress, tally: Tally) -> None:
        if look.at_s >= self._next_s:
            self._next_s = look.at_s + LINE_EVERY_S
            facts = "  ".join(f"{name} {value}" for name, value in _facts(look, tally))
            print(facts, file=sys.stderr, flush=True)


def _facts(look: ReplayProgress, tally: Tally) -> list[tuple[str, str]]:
    hours, seconds = divmod(int(look.trace_s), 3600)
    errors = {name: count for name, count in tally.by_outcome.items() if name != "200"}
    error_counts = ", ".join(f"{name}: {count:,}" for name, count in sorted(errors.items()))
    return [
        ("after", f"{look.at_s:.0f} s"),
        ("trace at", f"{hours:02}:{seconds // 60:02}"),
        ("due", f"{look.due:,}"),
        ("answered", f"{tally.by_outcome['200']:,}"),
        ("per second", f"{look.rate:,.0f}"),
        ("p50", f"{look.p50_ms:,.0f} ms"),
        ("p99", f"{look.p99_ms:,.0f} ms"),
        ("in flight", f"{look.in_flight:,}"),
        ("not sent", f"{tally.not_sent:,}"),
        ("others", error_counts or "none"),
    ]


def _table(look: ReplayProgress, tally: Tally, total: int) -> Table:
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _facts(look, tally):
        table.add_row(name, f"{value} of {total:,}" if name == "due" else value)
    return table


def replay(
    target: Target, plan: LoadPlan, pace: Pace, *, run: str, seed: int, path: Path
) -> dict[str, Any]:
    """Sends all requests and returns the summary. SIGINT and SIGTERM stop it gracefully.

    Args:
        run: prefix of all request ids.
        path: path of the ledger, which must not exist yet.

    Raises:
        ConfigurationError: the ledger can't be written. Unavailable: nothing is listening at the
            target.
    """
    try:
        return uvloop.run(_replay(target, plan, pace, run=run, seed=seed, path=path))
    except Unavailable:
        path.unlink()  # nothing was sent, so the same command can be repeated
        raise


async def _replay(
    target: Target, plan: LoadPlan, pace: Pace, *, run: str, seed: int, path: Path
) -> dict[str, Any]:
    head = LedgerHead(run, target.url, time())
    with open_ledger(path, head) as ledger, show_progress(len(plan.arrivals)) as show:
        replay = Replay(
            target,
            run,
            plan.arrivals,
            plan.forms,
            pace,
            seed=seed,
            ledger=ledger,
            show=show,
        )
        with _stop_by_signals(replay.stop):
            await replay.run()
    return {
        "run": run,
        "ledger": str(path),
        "was_stopped": replay.was_stopped,
        **replay.tally.summary(replay.took_s),
    }


@contextmanager
def _stop_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
