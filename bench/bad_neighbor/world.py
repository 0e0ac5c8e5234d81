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

import yaml

from bench.bad_neighbor.cpu_load import cpu_times
from bench.bad_neighbor.inputs import BAD, MAX_TOKENS, QUIET, SPENT, WRITER
from bench.pipeline import MODELS_FILE, say_nothing
from infra.local.ports import Ports
from infra.local.stack import Stack
from infra.local.up import build_stack
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
            "PENSTOCK_MODELS_FILE": str(_catalog(folder)),
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
        with build_stack(folder, Ports.free(), settings, say_nothing) as stack:
            yield stack


def _catalog(folder: Path) -> Path:
    weights = folder / WRITER
    weights.mkdir()
    # Imports transformers, which only the process that starts a stack needs.
    from tests.workers.models.generation import tiny

    tiny.write_folder(weights)
    writer: dict[str, Any] = {
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
    catalog = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))
    catalog["models"].append(writer)
    path = folder / "models.yaml"
    path.write_text(yaml.safe_dump(catalog), encoding="utf-8")
    return path


def await_idle(stack: Stack) -> float:
    """Waits until the stack's processes are idle.

    Returns the seconds waited, up to a limit.
    """
    began_s = time.monotonic()
    before_s = _cpu_s(stack)
    while time.monotonic() - began_s < IDLE_LIMIT_S:
        time.sleep(LOOK_S)
        now_s = _cpu_s(stack)
        if now_s - before_s < IDLE_CPU_S * LOOK_S:
            break
        before_s = now_s
    return time.monotonic() - began_s


def _cpu_s(stack: Stack) -> float:
    spent = cpu_times({name: process.pid for name, process in stack.processes.items()})
    return sum(used.cpu_s for family in spent.values() for used in family.values())
