"""The stack used by both tenants: `penstock up` with keys and a small model for each task.

The text model has random weights, so nothing needs to be downloaded. It generates text as fast as a
small machine can, so that the measurement is about the rest of the pipeline.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import pipeline
from bench.bad_neighbor.cpu_load import cpu_times
from bench.bad_neighbor.inputs import BAD, MAX_TOKENS, QUIET, SPENT, WRITER
from infra.local.stack import Stack
from shared.tenants.plan import Limits, Plan
from tests.keys import keys_url, stored

CONTEXT_TOKENS = 256
FILES_MAX_BYTES = 256 * 1024 * 1024
"""A tenant's file quota. The shipped quota would take minutes to fill."""
PLANS = {
    "quiet": Plan(requests_per_min=100_000, budget_usd_per_month=1e6),
    "bad": Plan(requests_per_min=1_000_000, budget_usd_per_month=1e6),
}
"""Both tenants' plans: usage is counted, but neither tenant is stopped by its own limits."""
IDLE_LIMIT_S = 30.0
IDLE_CPU_S = 0.25
"""CPU seconds per second that an idle stack uses."""
LOOK_S = 0.5


@contextmanager
def serving() -> Iterator[Stack]:
    """Yields the running stack, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="penstock-neighbors-") as name:
        folder = Path(name)
        settings = {
            "PENSTOCK_FILES_MAX_BYTES": str(FILES_MAX_BYTES),
            "PENSTOCK_KEYS_URL": keys_url(
                folder,
                plans=PLANS,
                tenants={"quiet": "quiet", "bad": "bad"},
                keys=[
                    stored(QUIET, "quiet"),
                    stored(BAD, "bad"),
                    stored(SPENT, "bad", limits=Limits(budget_usd_per_month=0.0)),
                ],
            ),
        }
        models = [*pipeline.read_shipped_models(), _writer(folder)]
        with pipeline.serving(models, settings) as stack:
            yield stack


def _writer(folder: Path) -> dict[str, Any]:
    weights = folder / WRITER
    weights.mkdir()
    # Imports transformers, which only the process that starts a stack needs.
    from tests.workers.models.generation import tiny

    tiny.write_folder(weights)
    return {
        "name": WRITER,
        "task": "text",
        "source": f"local:{weights}",
        "precision": "fp32",
        "batch": {"max_tokens": 16 * CONTEXT_TOKENS, "max_items": 16},
        "generation": {
            "context_tokens": CONTEXT_TOKENS,
            "default_tokens": 16,
            "longest_tokens": MAX_TOKENS,
            "chunk_tokens": 64,
        },
        "deadline": {"default_s": 60, "longest_s": 300},
        "price": {"per_million_tokens_usd": 0.1, "per_million_output_tokens_usd": 0.3},
    }


def await_idle(stack: Stack) -> None:
    """Waits until the stack's processes are idle, for up to IDLE_LIMIT_S."""
    began_s = time.monotonic()
    before_s = _cpu_s(stack)
    while time.monotonic() - began_s < IDLE_LIMIT_S:
        time.sleep(LOOK_S)
        now_s = _cpu_s(stack)
        if now_s - before_s < IDLE_CPU_S * LOOK_S:
            return
        before_s = now_s


def _cpu_s(stack: Stack) -> float:
    spent = cpu_times({name: process.pid for name, process in stack.processes.items()})
    return sum(used.cpu_s for family in spent.values() for used in family.values())
