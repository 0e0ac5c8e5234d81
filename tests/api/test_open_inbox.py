"""Which subscription a request gets: any sequence of jobs that begin and end, against a model."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from api.dispatch.reply_inbox import OpenInbox
from shared.catalog_entry import Replies

SLOTS = 3
KINDS = st.sampled_from(["direct", "slots"])
STEPS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2), KINDS), max_size=60)


async def run(steps: list[tuple[int, int, Replies]]) -> None:
    """A step begins a job of a request, or ends it where it is there already."""
    inbox = OpenInbox("7", SLOTS)
    kind_of: dict[int, Replies] = {}
    jobs: dict[int, dict[int, tuple[str, str]]] = {}
    for request, part, kind in steps:
        if part in jobs.get(request, {}):
            inbox.remove(str(request), part)
            del jobs[request][part]
            if not jobs[request]:
                del jobs[request]
            continue
        is_new = request not in jobs
        taken = Counter(
            next(iter(parts.values()))[1] for one, parts in jobs.items() if kind_of[one] == "slots"
        )
        if is_new:
            kind_of[request] = kind  # a request has one model, so its jobs have one kind
        waiting = inbox.register(str(request), part, kind_of[request])
        place = (waiting.inbox, waiting.slot)
        if not is_new:
            assert place == next(iter(jobs[request].values())), "parts of a request stay together"
        elif kind == "direct":
            assert place == ("inbox.7.direct", "")
        else:
            assert waiting.inbox == "inbox.7"
            assert taken[waiting.slot] == min(taken[str(slot)] for slot in range(SLOTS))
        jobs.setdefault(request, {})[part] = place
    assert inbox.direct.requests == sum(kind_of[request] == "direct" for request in jobs)
    assert sum(slot.requests for slot in inbox.slots) == sum(
        kind_of[request] == "slots" for request in jobs
    )


@given(STEPS)
def test_slots_are_exclusive_while_one_is_free_and_direct_requests_take_none(
    steps: list[tuple[int, int, Replies]],
) -> None:
    asyncio.run(run(steps))
