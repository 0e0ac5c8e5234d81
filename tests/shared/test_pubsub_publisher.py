"""Messages are sent at once, batched, in order, retried after failures, and never without a
limit.
"""

import asyncio
from collections import deque

import grpc
import pytest

from shared.broker.pubsub import client
from shared.broker.pubsub.client import PubSubTransport
from shared.errors import BadInput, ConfigurationError, Overloaded, Unavailable
from tests.shared.scripted_pubsub import Opened, scripted_pubsub

pytestmark = pytest.mark.anyio


def publishing(transport: PubSubTransport, data: bytes, key: str = "") -> "asyncio.Task[str]":
    return asyncio.create_task(transport.publish("t", data, {}, ordering_key=key))


def bodies(request: "object") -> list[bytes]:
    return [message.data for message in request.messages]  # type: ignore[attr-defined]


async def test_idle_topic_sends_at_once_and_a_busy_one_together(opened: Opened) -> None:
    script, transport = opened
    script.gate.clear()
    limit = client.REQUESTS_IN_FLIGHT
    sent = []
    for number in range(limit):
        sent.append(publishing(transport, b"%d" % number))
        await script.seen("Publish", number + 1)
    sent += [publishing(transport, b"later %d" % number) for number in range(50)]
    await asyncio.sleep(0)
    script.gate.set()
    assert len(set(await asyncio.gather(*sent))) == limit + 50
    requests = script.requests["Publish"]
    assert [len(request.messages) for request in requests] == [1] * limit + [50]
    assert requests[-1].topic == "projects/p/topics/t"
    assert {"x-goog-request-params": "topic=projects%2Fp%2Ftopics%2Ft"}.items() <= script.metadata[
        0
    ].items()


async def test_request_holds_a_thousand_messages_at_most(opened: Opened) -> None:
    script, transport = opened
    await asyncio.gather(*(publishing(transport, b"%d" % number) for number in range(2500)))
    # Several requests are in flight at once, so they may arrive in any order.
    assert sorted(len(request.messages) for request in script.requests["Publish"]) == [
        500,
        1000,
        1000,
    ]


async def test_ordering_key_has_one_request_in_flight(opened: Opened) -> None:
    script, transport = opened
    script.gate.clear()
    script.failures["Publish"] = deque([grpc.StatusCode.UNAVAILABLE])
    sent = [publishing(transport, b"0", "key")]
    await script.seen("Publish", 1)
    sent += [publishing(transport, b"%d" % number, "key") for number in (1, 2)]
    other = publishing(transport, b"other", "another key")
    assert bodies((await script.seen("Publish", 2))[1]) == [b"other"]
    script.gate.set()
    await asyncio.gather(*sent, other)
    of_key = [
        bodies(request)
        for request in script.requests["Publish"]
        if request.messages[0].ordering_key == "key"
    ]
    assert of_key == [[b"0"], [b"0"], [b"1", b"2"]]


@pytest.mark.parametrize(
    "code", ["UNAVAILABLE", "INTERNAL", "ABORTED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"]
)
async def test_transient_failure_is_tried_again(opened: Opened, code: str) -> None:
    script, transport = opened
    script.failures["Publish"] = deque([grpc.StatusCode[code]] * 2)
    assert await transport.publish("t", b"1", {})
    assert len(script.requests["Publish"]) == 3


@pytest.mark.parametrize(
    ("code", "error"),
    [("RESOURCE_EXHAUSTED", Overloaded), ("UNAVAILABLE", Unavailable)],
)
async def test_failure_that_lasts_is_told_in_time(
    opened: Opened, code: str, error: type[Exception]
) -> None:
    script, transport = opened
    script.failures["Publish"] = deque([grpc.StatusCode[code]] * 1000)
    # Long enough to get one response on a busy machine. If there is no response at all, each call
    # is Unavailable.
    with pytest.raises(error):
        await transport.publish("t", b"1", {}, timeout_s=1.5)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("NOT_FOUND", BadInput),
        ("PERMISSION_DENIED", ConfigurationError),
        ("FAILED_PRECONDITION", Unavailable),
    ],
)
async def test_refusal_is_told_at_once(opened: Opened, code: str, error: type[Exception]) -> None:
    script, transport = opened
    script.failures["Publish"] = deque([grpc.StatusCode[code]])
    with pytest.raises(error):
        await transport.publish("t", b"1", {})
    assert len(script.requests["Publish"]) == 1


async def test_bad_message_fails_alone(opened: Opened) -> None:
    script, transport = opened
    script.refuses = lambda data: data == b"bad"
    outcomes = await asyncio.gather(
        *(publishing(transport, data) for data in (b"1", b"bad", b"2")), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [str, BadInput, str]


async def test_no_answer_in_time(opened: Opened) -> None:
    script, transport = opened
    script.gate.clear()
    with pytest.raises(Unavailable, match=r"no response within 0\.1 s"):
        await transport.publish("t", b"1", {}, timeout_s=0.1)
    script.gate.set()


async def test_broker_that_is_not_there() -> None:
    async with scripted_pubsub() as script:
        endpoint = script.endpoint
    async with PubSubTransport("p", endpoint) as transport:
        with pytest.raises(Unavailable):
            await transport.publish("t", b"1", {}, timeout_s=0.3)


async def test_full_queue_refuses_more(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    script, transport = opened
    script.gate.clear()
    monkeypatch.setattr(client, "QUEUE_LIMIT_MESSAGES", 3)
    sent = [publishing(transport, b"%d" % number) for number in range(3)]
    await script.seen("Publish", 1)
    with pytest.raises(Overloaded):
        await transport.publish("t", b"4", {})
    script.gate.set()
    await asyncio.gather(*sent)
    assert await transport.publish("t", b"5", {})


async def test_message_whose_caller_left_is_not_sent(opened: Opened) -> None:
    script, transport = opened
    script.gate.clear()
    first = publishing(transport, b"first", "key")
    await script.seen("Publish", 1)
    gone, stays = publishing(transport, b"gone", "key"), publishing(transport, b"stays", "key")
    await asyncio.sleep(0)
    gone.cancel()
    script.gate.set()
    await asyncio.gather(first, stays)
    assert [bodies(request) for request in script.requests["Publish"]] == [[b"first"], [b"stays"]]


async def test_closing_starts_no_more_requests() -> None:
    """More messages wait than may be in flight."""
    async with scripted_pubsub() as script:
        async with PubSubTransport("p", script.endpoint) as transport:
            script.gate.clear()
            waiting = []
            for number in range(client.REQUESTS_IN_FLIGHT):
                waiting.append(publishing(transport, b"%d" % number))
                await script.seen("Publish", number + 1)
            waiting += [publishing(transport, b"more"), publishing(transport, b"and more")]
            await asyncio.sleep(0)
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        script.gate.set()
    assert {str(answer) for answer in answers} == {"the connection to the broker is closed"}
    assert len(script.requests["Publish"]) == client.REQUESTS_IN_FLIGHT


async def test_closing_tells_who_waits() -> None:
    async with scripted_pubsub() as script:
        async with PubSubTransport("p", script.endpoint) as transport:
            script.gate.clear()
            waiting = publishing(transport, b"1")
            await script.seen("Publish", 1)
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(Unavailable):
            await transport.publish("t", b"2", {})
