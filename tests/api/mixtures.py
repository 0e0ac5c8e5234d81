"""Mixtures of requests, the ways callers end them, and failures that happen in the meantime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hypothesis import strategies as st

INSTANCES = 2
RUNNER = 2
"""Number of the process that runs batches. Lower numbers are API instances."""
NAMES = ("one", "two", "poor", "open")
"""Key names."""

Kind = Literal[
    "texts", "revised", "image", "write", "stream", "prediction", "drawing", "flow", "batch"
]
End = Literal[
    "read",
    "hang up",
    "hang up at once",
    "late",
    "cancel",
    "cancel and delete",
    "cancel beside delete",
    "delete",
]
PREDICTIONS = ("prediction", "drawing", "stream", "flow")


@dataclass(frozen=True)
class Ask:
    """A request, and how its caller ends it.

    `items` are chosen from a few texts, so that some are found in the cache and some are joined.
    The worker rejects item 7, and item 8 fails. `repeats` chooses an Idempotency-Key; 0 means none.
    """

    kind: Kind
    key: str = "one"
    items: tuple[int, ...] = (0,)
    end: End = "read"
    repeats: int = 0
    instance: int = 0
    waits: bool = False
    is_put: bool = False
    """True if a prediction is created under an ID that the caller chose through `repeats`."""

    @property
    def ends_early(self) -> bool:
        """True if the request ends even while model processes are held."""
        is_canceled = self.end.startswith("cancel") and self.kind in PREDICTIONS and not self.waits
        return is_canceled or self.end in ("late", "hang up", "hang up at once")


@dataclass(frozen=True)
class NewBudget:
    """A new budget for a tenant, or for the key "two".

    Either the tenant's plan changes, or the tenant `moves` to another plan. If `usd` is None, there
    is no budget.
    """

    holder: Literal["rich", "poor", "open", "two"]
    usd: float | None
    moves: bool = False


@dataclass(frozen=True)
class Wave:
    """Requests that are in flight together.

    `outage`: the instances can't reach Redis, or don't get its responses. `dies`: the process that
    is killed during the wave. `model_dies`: the model process dies once. `budgets` change during
    the wave: the first instance learns of them immediately, the second at the end of the wave.
    """

    asks: tuple[Ask, ...]
    budgets: tuple[NewBudget, ...] = ()
    outage: Literal["", "cut off", "answers lost"] = ""
    dies: int | None = None
    model_dies: bool = False


@dataclass(frozen=True)
class Mixture:
    """One example. `turn` is the wave during which the month ends."""

    waves: tuple[Wave, ...]
    batches: tuple[Ask, ...] = ()
    turn: int | None = None


asks = st.builds(
    Ask,
    kind=st.sampled_from(
        ["texts"] * 3
        + ["revised"] * 2
        + ["image", "write", "stream", "prediction", "drawing"]
        + ["flow"] * 2
    ),
    key=st.sampled_from(NAMES),
    items=st.lists(st.integers(0, 8), min_size=1, max_size=6).map(tuple),
    end=st.sampled_from(["read", *get_args(End)]),
    repeats=st.sampled_from([0, 0, 1, 2]),
    instance=st.integers(0, INSTANCES - 1),
    waits=st.booleans(),
    is_put=st.booleans(),
)
batches = st.builds(
    Ask,
    kind=st.just("batch"),
    key=st.sampled_from(NAMES),
    items=st.lists(st.integers(0, 8), min_size=1, max_size=4).map(tuple),
    end=st.sampled_from(["read", "cancel"]),
)
many_asks = st.lists(asks, min_size=2, max_size=6).map(tuple)
new_budgets = st.builds(
    NewBudget,
    st.sampled_from(["rich", "poor", "open", "two"]),
    st.sampled_from([None, 0.01, 0.03, 0.1, 1000.0]),
    st.booleans(),
)
waves = st.one_of(
    st.builds(Wave, many_asks, model_dies=st.booleans()),
    st.builds(Wave, many_asks, st.lists(new_budgets, min_size=1, max_size=3).map(tuple)),
    st.builds(Wave, many_asks, outage=st.sampled_from(["cut off", "answers lost"])),
    st.builds(Wave, many_asks, dies=st.integers(0, RUNNER)),
)
mixtures = st.builds(
    Mixture,
    st.lists(waves, min_size=1, max_size=3).map(tuple),
    st.lists(batches, max_size=1).map(tuple),
    st.sampled_from([None, None, 0, 1]),
)

UNPAID = Mixture(
    waves=(
        Wave(
            (
                Ask("texts", items=(0, 1, 7)),
                Ask("texts", "two", (2, 3, 8)),
                Ask("texts", items=(4, 5), end="hang up"),
                Ask("image", items=(8,)),
                Ask("prediction", items=(6,), end="cancel beside delete"),
            ),
        ),
        Wave(
            (
                Ask("texts", items=(0, 1), instance=1),
                Ask("texts", "two", (0, 2, 3)),
                Ask("prediction", items=(4,)),
                Ask("texts", items=(5, 7), end="late"),
            ),
        ),
        Wave((Ask("texts", items=(0, 1, 2, 3, 4, 5)), Ask("texts", "two", (5, 6), instance=1))),
    ),
    batches=(Ask("batch", items=(0, 3, 7), end="cancel"),),
)
"""Unpaid results are requested again, both on the same instance and on a different one."""

DEATHS = Mixture(
    waves=(
        Wave(
            (
                Ask("texts", items=(0, 1)),
                Ask("revised", "two", (2, 4)),
                Ask("prediction", items=(3,)),
                Ask("texts", "poor", (5,), repeats=1),
                Ask("write", instance=1),
            ),
            dies=0,
        ),
        Wave((Ask("texts", "poor", (5,), repeats=1, instance=1), Ask("revised")), dies=RUNNER),
    ),
    batches=(Ask("batch", items=(0, 1, 6)),),
    turn=1,
)
"""An instance with requests of every kind dies, followed by the batch process."""

BUDGETS = Mixture(
    waves=(
        Wave(
            (
                Ask("texts", "poor", (1, 2), instance=1),
                Ask("flow", items=(0, 1)),
                Ask("prediction", "two", (3,), instance=1),
            ),
            (NewBudget("poor", None, moves=True), NewBudget("rich", None), NewBudget("two", None)),
        ),
        Wave(
            (
                Ask("texts", "poor", (3, 4, 5)),
                Ask("texts", "two", (0, 4, 6)),
                Ask("prediction", "poor", (6,), instance=1),
                Ask("flow", items=(0, 1, 2), end="cancel beside delete"),
                Ask("flow", items=(1,), end="cancel beside delete", instance=1),
                Ask("flow", items=(1, 4), instance=1),
            ),
            (NewBudget("poor", 0.03), NewBudget("rich", 0.1, moves=True), NewBudget("two", 0.01)),
        ),
        Wave(
            (
                Ask("texts", "poor", (0, 6)),
                Ask("texts", "two", (5,), instance=1),
                Ask("flow", items=(0, 5), end="cancel and delete"),
            ),
            (NewBudget("poor", 1000.0, moves=True), NewBudget("rich", 0.01)),
        ),
    ),
    batches=(Ask("batch", "poor", items=(0, 3, 6)),),
)
"""Budgets are removed, set below the amount already spent, raised, and lowered while flows run."""
