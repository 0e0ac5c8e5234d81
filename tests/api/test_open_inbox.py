"""Subscriptions as any sequence of jobs starts and finishes, checked against a reference model."""

import asyncio
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from api.dispatch.reply_inbox import OpenInbox
from shared.broker.transport import ReceivedMessage
from shared.errors import DeadlineExceeded
from shared.messages import Reply, ReplyBody, encode_reply, encode_reply_batch, encode_reply_body
from shared.models.entry import Replies

SLOTS = 3
KINDS = st.sampled_from(["direct", "slots"])
STEPS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2), KINDS), max_size=60)


async def run(steps: list[tuple[int, int, Replies]]) -> None:
    """Each step starts a request's job, or finishes it if it already exists."""
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
            kind_of[request] = kind  # a request has one model, so all its jobs are of one kind
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


def body(worker: str) -> ReplyBody:
    return ReplyBody([], worker=worker)


def received(data: bytes, attributes: Mapping[str, str]) -> ReceivedMessage:
    return ReceivedMessage(data, attributes, "1", "1")


def count(outcome: str) -> float:
    found = REGISTRY.get_sample_value("penstock_inbox_replies_total", {"outcome": outcome})
    return found or 0.0


@pytest.mark.anyio
async def test_each_reply_of_a_message_finds_its_job() -> None:
    inbox = OpenInbox("7", SLOTS)
    places = [("one", 0), ("one", 1), ("two", 0)]
    waiting = [inbox.register(request_id, part, "direct") for request_id, part in places]
    before = {outcome: count(outcome) for outcome in ("delivered", "duplicate", "unknown")}
    encoded = [
        (request_id, part, encode_reply_body(body(f"{request_id} {part}")))
        for request_id, part in [*places, ("gone", 0), ("one", 7), ("two", 0)]
    ]
    inbox.deliver(received(*encode_reply_batch(encoded, "")))
    found = [await one.reply(0.0) for one in waiting]
    assert [(one.request_id, one.part, one.body.worker) for one in found] == [
        (request_id, part, f"{request_id} {part}") for request_id, part in places
    ]
    after = {outcome: count(outcome) - before[outcome] for outcome in before}
    assert after == {"delivered": 3, "duplicate": 1, "unknown": 2}


@pytest.mark.anyio
async def test_a_reply_that_cannot_be_read_costs_no_other_one_of_its_message() -> None:
    inbox = OpenInbox("7", SLOTS)
    broken, fine, alone = (inbox.register(name, 0, "slots") for name in ("broken", "fine", "alone"))
    before = count("undecodable")
    encoded = [("broken", 0, b'{"outcomes": 7}'), ("fine", 0, encode_reply_body(body("w")))]
    inbox.deliver(received(*encode_reply_batch(encoded, fine.slot)))
    assert (await fine.reply(0.0)).body.worker == "w"
    with pytest.raises(DeadlineExceeded):
        await broken.reply(0.0)
    for data, attributes in (
        (b"{", {"schema": "1", "replies": "1"}),
        (b'{"replies": []}', {"schema": "2", "replies": "0"}),
    ):
        inbox.deliver(received(data, attributes))
    assert count("undecodable") - before == 3
    inbox.deliver(received(*encode_reply(Reply("alone", 0, alone.slot, body("earlier release")))))
    assert (await alone.reply(0.0)).body.worker == "earlier release"
