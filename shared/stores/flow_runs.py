"""The steps of flow runs in Redis: their jobs and their items' outcomes.

A run is a prediction whose record (shared/stores/records.py) shows whether it is open. Its steps
are in a hash alongside the record, `<record>:flow`, which is deleted with the record:

    input            the run's input
    budget           the budget of all predictions, in bytes, as known to the API
    n:<step>         the number of items of a step, once it is known
    d:<step>         how many of them are done
    j:<step>         the number of its jobs
    h:<step>         the number of jobs that were handed to a process to publish
    b:<step>         1 once the broker has the first of them
    p:<step>:<job>   the items of a job
    o:<item>         how an item ended, by its index in the run
    w:<item>         the jobs handed to the process that ended the job that begins with this item

The scripts next to this file (flow_*.lua) decide what is counted: a step's first plan, an item's
first outcome, and nothing once the run is closed or has ended. Repeating a call after any crash
therefore leads to the same result.

Calls raise Unavailable if Redis does not respond.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from shared.stores.records_redis import RecordsRedis
from shared.stores.redis_client import load_script
from shared.stores.retention import BUDGET_BYTES

Planned = Literal["stored", "known", "ended", "no_room"]
"""The result of planning a step.

`known`: another process stored it. `ended`: the run has ended. `no_room`: the tenant's predictions
leave no room for the step.
"""
_PLANNED: dict[int, Planned] = {1: "stored", 0: "known", -1: "ended", -2: "no_room"}
WINDOW_JOBS = 64
"""Approximate number of jobs per step that a run keeps in the topic at once."""
_STATES = "shared/stores/record_states.lua"
_BUDGET = ("shared/stores/retention.lua", "shared/stores/record_budget.lua")
OPEN = load_script("shared/stores/flow_open.lua")
PLAN = load_script(*_BUDGET, _STATES, "shared/stores/flow_plan.lua")
MARK = load_script("shared/stores/retention.lua", _STATES, "shared/stores/flow_mark.lua")
PUBLISHED = load_script("shared/stores/flow_published.lua")
LOOK = load_script(_STATES, "shared/stores/flow_look.lua")
CLOSE = load_script(_STATES, "shared/stores/flow_close.lua")


class FlowRuns:
    """The flow runs stored in one Redis instance.

    Args:
        max_bytes: budget for all predictions and their steps, for runs opened here. Processes that
            only advance runs use the budget stored with each run.
    """

    def __init__(self, redis: RecordsRedis, *, max_bytes: int = BUDGET_BYTES) -> None:
        self._redis = redis
        self._commands = redis.small_commands
        self._max_bytes = max_bytes

    async def open(self, run: str, data: bytes) -> bool:
        """Stores a run's input. Returns whether the run exists."""
        args = (data, self._max_bytes)
        return bool(await self._commands.run_script(OPEN, self._keys(run), *args))

    async def plan(
        self,
        run: str,
        step: int,
        jobs: Sequence[bytes],
        items: int,
        done: Mapping[int, bytes],
    ) -> Planned:
        """Stores a step's jobs.

        Args:
            items: number of items, including finished ones.
            done: outcomes of items that are already finished.
        """
        fields: list[str | bytes] = []
        for number, job in enumerate(jobs):
            fields += (f"p:{step}:{number}", job)
        for index, outcome in done.items():
            fields += (f"o:{index}", outcome)
        first = min(len(jobs), WINDOW_JOBS)
        counts = (step, items, len(done), len(jobs), first)
        args = (time.time(), *counts, *fields)
        keys = (*self._keys(run), self._redis.predictions_key)
        return _PLANNED[await self._commands.run_script(PLAN, keys, *args)]

    async def jobs(self, run: str, step: int, numbers: Sequence[int]) -> list[bytes]:
        """Returns a step's jobs. Jobs of dropped runs are omitted."""
        if not numbers:
            return []
        fields = [f"p:{step}:{number}" for number in numbers]
        values = await self._commands.run("HMGET", self._keys(run)[1], *fields)
        return [value for value in values if value is not None]

    async def read_planned(self, run: str) -> list[bytes]:
        fields = await self._commands.run("HGETALL", self._keys(run)[1])
        return [value for name, value in fields.items() if name.startswith(b"p:")]

    async def note_published(self, run: str, step: int) -> None:
        """Records that the broker has received a step's first jobs."""
        await self._commands.run_script(PUBLISHED, self._keys(run), f"b:{step}")

    async def mark(self, run: str, step: int, outcomes: Mapping[int, bytes]) -> Marked:
        """Records the outcomes of a job's items.

        Raises:
            Unavailable: Redis did not respond, but may have recorded them.
        """
        pairs = [part for index, outcome in outcomes.items() for part in (index, outcome)]
        args = (step, WINDOW_JOBS, min(outcomes), *pairs)
        keys = (*self._keys(run), self._redis.predictions_key)
        answer = await self._commands.run_script(MARK, keys, *args)
        is_open, items, done, first, end, is_repeated, is_published, *known_outcomes = answer
        counting = [
            None if known == b"-" else known or ours
            for known, ours in zip(known_outcomes, outcomes.values(), strict=True)
        ]
        facts = (range(first, end), bool(is_repeated), bool(is_published))
        return Marked(bool(is_open), items, done, *facts, counting)

    async def look(self, jobs: Sequence[tuple[str, Sequence[int]]]) -> list[Look]:
        """Returns whether jobs still need to be run.

        Args:
            jobs: each job's run and item indexes.
        """
        keys = [key for run, _ in jobs for key in self._keys(run)]
        args = [part for _, items in jobs for part in (len(items), *items)]
        answers = await self._commands.run_script(LOOK, keys, time.time(), *args)
        return [Look(bool(is_open), bool(begins), done) for is_open, begins, done in answers]

    async def close(self, run: str, reason: bytes) -> bool:
        """Closes a run, so that no further items are counted. Returns whether it was open.

        Raises:
            Unavailable: Redis did not respond, but may have closed it.
        """
        record, _ = self._keys(run)
        args = (reason, self._redis.canceled_channel, run)
        return bool(await self._commands.run_script(CLOSE, [record], *args))

    async def read(self, run: str) -> RunState:
        fields = await self._commands.run("HGETALL", self._keys(run)[1])
        known = {name.decode(): value for name, value in fields.items()}
        steps = {
            int(name[2:]): StepState(
                int(value),
                int(known.get(f"d:{name[2:]}", 0)),
                int(known.get(f"j:{name[2:]}", 0)),
                f"b:{name[2:]}" in known,
            )
            for name, value in known.items()
            if name.startswith("n:")
        }
        outcomes = {int(name[2:]): value for name, value in known.items() if name.startswith("o:")}
        return RunState(known.get("input"), steps, outcomes)

    async def progress(self, run: str, steps: int) -> list[tuple[int, int] | None]:
        """Returns the number of items per step, and the number of finished items.

        None if the step's items are not known yet.
        """
        names = [f"{kind}:{step}" for step in range(steps) for kind in ("n", "d")]
        values = await self._commands.run("HMGET", self._keys(run)[1], *names)
        pairs = zip(values[::2], values[1::2], strict=True)
        return [None if items is None else (int(items), int(done or 0)) for items, done in pairs]

    async def outcomes(self, run: str, indexes: Sequence[int]) -> list[bytes | None]:
        """Returns the items' outcomes, with None for unfinished items."""
        if not indexes:
            return []
        names = [f"o:{index}" for index in indexes]
        return list(await self._commands.run("HMGET", self._keys(run)[1], *names))

    def _keys(self, run: str) -> tuple[str, str]:
        record = self._redis.record_key(run)
        return record, f"{record}:flow"


class Marked(NamedTuple):
    """The outcomes that apply to a job's items."""

    is_open: bool
    """True if the run continues."""
    items: int
    """Number of items in the step."""
    done: int
    """Number of finished items."""
    jobs: range
    """Numbers of the step's jobs to publish next."""
    is_repeated: bool
    """True if an item was already known."""
    is_published: bool
    """True if the API has published all of the run's first jobs."""
    outcomes: list[bytes | None]
    """The stored outcome of each item, old or new.

    None if nothing is counted because the run has ended.
    """

    @property
    def is_complete(self) -> bool:
        return self.done >= self.items


class Look(NamedTuple):
    """Result of checking whether a job still needs to be done."""

    is_open: bool
    begins: bool
    """True if it is the first job in its run."""
    done: int
    """Number of finished items."""


class StepState(NamedTuple):
    """The stored state of a step."""

    items: int
    done: int
    jobs: int
    is_published: bool


class RunState(NamedTuple):
    """The stored state of a run."""

    input: bytes | None
    steps: dict[int, StepState]
    """Steps by number. Steps that aren't known yet are omitted."""
    outcomes: dict[int, bytes]
    """Outcomes of finished items, keyed by index."""
