import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadInput, DeadlineExceeded, PenstockError, UndecodableMessage
from shared.messages import (
    Envelope,
    Item,
    ItemError,
    ItemOutcome,
    Job,
    JobBody,
    Receipt,
    Reply,
    ReplyBody,
    decode_job,
    decode_leniently,
    decode_reply,
    decode_reply_batch,
    decode_reply_body,
    encode_job,
    encode_reply,
    encode_reply_batch,
    encode_reply_body,
    failure,
    is_reply_batch,
)
from shared.models.blob import Blob
from shared.models.catalog import Model
from shared.models.entry import Batch, Price
from shared.models.tasks.embedding import EmbeddingResult, TextInput, TokensInput
from shared.models.tasks.image import ChosenAdapter, ImageInput, ImageResult
from shared.tenants.plan import HEAVIEST, LIGHTEST, PRIORITIES
from shared.usage.row import row_of

MINI = Model(
    name="mini", task="embedding", source="local:x", dimensions=1, batch=Batch(max_tokens=1)
)
texts = st.text(max_size=40)
cuts = st.sampled_from(["none", "end", "start"])
names = st.text(min_size=1, max_size=20)
counts = st.integers(0, 2**31)
seconds = st.floats(0, 4e9)
blobs = st.builds(Blob, names, data=st.binary(max_size=64)) | st.builds(
    Blob, names, object_key=names
)
inputs = st.one_of(
    st.builds(TextInput, texts, cuts),
    st.builds(TokensInput, st.lists(counts, max_size=5), cuts),
    st.builds(
        ImageInput, prompt=texts, width=counts, height=counts, steps=counts,
        guidance_scale=st.floats(0, 50), seed=st.integers(0, 2**63 - 1), scheduler=names,
        negative_prompt=texts, image=st.none() | blobs, strength=st.none() | st.floats(0, 1),
        mask=st.none() | blobs,
        adapter=st.none() | st.builds(ChosenAdapter, names, names, st.floats(-1, 3)),
    ),
)  # fmt: skip
items = st.lists(
    st.builds(Item, counts, inputs, cache_key=st.none() | names),
    min_size=1,
    max_size=4,
    unique_by=lambda item: item.index,
)
envelopes = st.builds(
    Envelope, request_id=names, part=counts, model=names, tenant=names, inbox=texts, slot=texts,
    deadline_s=seconds, received_at_s=seconds, published_at_s=seconds, api_instance=texts,
    attempt=counts, traceparent=texts, cache_key=texts, client_request_id=texts,
    weight=st.floats(LIGHTEST, HEAVIEST) | st.just(1.0), plan=texts, user_agent_family=texts,
    batch_id=texts, priority=st.sampled_from(PRIORITIES),
)  # fmt: skip
jobs = st.builds(
    Job, envelopes, st.builds(JobBody, items, cache_read=st.booleans(), cache_write=st.booleans())
)
maybe_ms = st.none() | st.floats(0, 1e6)
receipts = st.builds(
    Receipt, cache=names, pulled_at_s=st.none() | seconds, batch_wait_ms=maybe_ms,
    inference_ms=maybe_ms, batch_size=st.none() | counts, tokens=st.none() | counts,
    padded_tokens=st.none() | counts, cold_start=st.booleans(),
)  # fmt: skip
results = st.builds(EmbeddingResult, st.binary(max_size=64), counts) | st.builds(
    ImageResult, blobs, counts, counts, seed=counts, pixel_steps=counts
)
outcomes = st.builds(ItemOutcome, counts, names, receipts, result=st.none() | results) | st.builds(
    ItemOutcome,
    counts,
    names,
    receipts,
    error=st.builds(ItemError, names, texts, field=st.none() | names),
)
replies = st.builds(
    Reply,
    names,
    counts,
    slot=texts,
    body=st.builds(ReplyBody, st.lists(outcomes, max_size=4), worker=texts),
)


def job(**fields: Any) -> Job:
    envelope: dict[str, Any] = {"request_id": "req_1", "part": 0, "model": "mini", "tenant": "t"}
    times = {"deadline_s": 130.0, "received_at_s": 100.0, "published_at_s": 100.5}
    return Job(Envelope(**envelope | times | fields), JobBody([Item(0, TextInput("a cat"))]))


@given(jobs)
def test_job_round_trip(sent: Job) -> None:
    data, attributes = encode_job(sent)
    assert all(isinstance(value, str) and value for value in attributes.values())
    assert decode_job(data, attributes) == sent


@given(replies)
def test_reply_round_trip(sent: Reply) -> None:
    data, attributes = encode_reply(sent)
    assert decode_reply(data, attributes) == sent


@given(st.lists(replies, min_size=1, max_size=5), st.sampled_from(["", "17"]))
def test_several_replies_make_a_round_trip(sent: list[Reply], slot: str) -> None:
    bodies = [(one.request_id, one.part, encode_reply_body(one.body)) for one in sent]
    data, attributes = encode_reply_batch(bodies, slot)
    assert is_reply_batch(attributes)
    assert attributes["replies"] == str(len(sent))
    assert attributes.get("slot", "") == slot
    found = decode_reply_batch(data, attributes)
    assert [(one.request_id, one.part, decode_reply_body(one.body)) for one in found] == [
        (one.request_id, one.part, one.body) for one in sent
    ]


@given(
    st.binary(max_size=60),
    st.dictionaries(st.sampled_from([*Envelope.__struct_encode_fields__, "schema"]), texts),
)
def test_noise_is_undecodable_and_nothing_else(data: bytes, attributes: dict[str, str]) -> None:
    for decode in (decode_job, decode_reply, decode_reply_batch):
        with pytest.raises(UndecodableMessage):
            decode(data, attributes | {"schema": "1"})


def test_job_on_the_wire_is_what_the_documentation_shows() -> None:
    data, attributes = encode_job(job(inbox="inbox.7", slot="17"))
    assert json.loads(data) == {"items": [{"index": 0, "input": {"type": "text", "text": "a cat"}}]}
    assert attributes == {
        "schema": "1",
        "request_id": "req_1",
        "part": "0",
        "model": "mini",
        "tenant": "t",
        "inbox": "inbox.7",
        "slot": "17",
        "deadline_s": "130.0",
        "received_at_s": "100.0",
        "published_at_s": "100.5",
        "attempt": "1",
    }


def test_message_of_an_older_api_has_no_id_of_the_caller() -> None:
    data, attributes = encode_job(job(client_request_id="order-17"))
    assert attributes.pop("client_request_id") == "order-17"
    old = decode_job(data, attributes)
    assert row_of(old.envelope, failure(0, BadInput("no")), None).client_request_id is None


def test_job_of_a_newer_release_is_read_by_an_older_one_and_the_reverse() -> None:
    facts = {"plan": "team", "user_agent_family": "curl", "batch_id": "batch_1"}
    data, attributes = encode_job(job(**facts))
    assert facts.items() <= attributes.items()
    row = row_of(decode_job(data, attributes).envelope, failure(0, BadInput("no")), MINI)
    assert (row.plan, row.user_agent_family, row.batch_id) == ("team", "curl", "batch_1")
    old = {name: value for name, value in attributes.items() if name not in facts}
    row = row_of(decode_job(data, old).envelope, failure(0, BadInput("no")), MINI)
    assert (row.plan, row.user_agent_family, row.batch_id) == (None, None, None)
    # Attributes that a release does not recognize must not prevent it from reading a job.
    assert decode_job(data, attributes | {"fact_of_tomorrow": "x"}).envelope.plan == "team"


def test_reply_of_another_release_is_read() -> None:
    receipt = {"cache": "miss", "batch_size": 2, "tokens": 4}
    for more in ({}, {"padded_tokens": 7, "cold_start": True, "fact_of_tomorrow": 1}):
        outcome = {"index": 0, "status": "failed", "receipt": receipt | more}
        found = msgspec.json.decode(json.dumps(outcome), type=ItemOutcome)
        row = row_of(job().envelope, found, MINI)
        assert (row.padded_tokens, row.cold_start) == ((7, True) if more else (4, False))
        assert row.batch_capacity == MINI.batch.max_items


def test_row_says_of_a_batch_only_where_a_model_ran() -> None:
    row = row_of(job().envelope, ItemOutcome(0, "succeeded", Receipt("redis", tokens=4)), MINI)
    assert (row.cold_start, row.batch_capacity, row.padded_tokens) == (None, None, None)
    joined = ItemOutcome(0, "succeeded", Receipt("joined", tokens=4, batch_size=3))
    assert row_of(job().envelope, joined, MINI).padded_tokens is None


def test_priority_has_its_old_name_on_the_wire_and_is_left_out_if_interactive() -> None:
    assert not {"lane", "priority"} & encode_job(job(priority="interactive"))[1].keys()
    data, attributes = encode_job(job(priority="batch"))
    assert attributes["lane"] == "batch"
    assert "priority" not in attributes
    assert decode_job(data, attributes).envelope.priority == "batch"
    read = decode_leniently(attributes | {"deadline_s": "soon"})
    assert read is not None
    assert read.priority == "batch"


def test_weight_is_on_the_wire_only_if_it_is_not_one() -> None:
    assert "weight" not in encode_job(job(weight=1.0))[1]
    data, attributes = encode_job(job(weight=2.5))
    assert attributes["weight"] == "2.5"
    assert decode_job(data, attributes).envelope.weight == 2.5
    del attributes["weight"]
    assert decode_job(data, attributes).envelope.weight == 1.0, "a message of an older API"


@pytest.mark.parametrize("weight", ["0", "-1", "0.009", "1001", "nan", "inf", "much", ""])
def test_wrong_weight_is_named(weight: str) -> None:
    data, attributes = encode_job(job())
    with pytest.raises(UndecodableMessage, match="weight") as caught:
        decode_job(data, attributes | {"weight": weight})
    assert caught.value.field == "attributes"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema": "2"}, "schema"),
        ({"schema": None}, "schema"),
        ({"request_id": None}, "attributes"),
        ({"part": "first"}, "attributes"),
        ({"deadline_s": "tomorrow"}, "attributes"),
        ({"deadline_s": "nan"}, "attributes"),
        ({"deadline_s": "inf"}, "attributes"),
    ],
    ids=str,
)
def test_wrong_attribute_is_named(change: dict[str, str | None], field: str) -> None:
    data, attributes = encode_job(job())
    changed = {name: value for name, value in (attributes | change).items() if value is not None}
    with pytest.raises(UndecodableMessage) as caught:
        decode_job(data, changed)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{}", b"[]", b'{"items": []}', b'{"items": [{"index": 0}]}', b"\xff"),
        b'{"items": [{"index": 0, "input": {"type": "sound"}}]}',
        b'{"items": [{"index": 0, "input": {"type": "text", "text": "\xff"}}]}',
        b'{"items": [{"index": 0, "input": {"type": "tokens", "tokens": ["a"]}}]}',
        b'{"items": [%s, %s]}' % ((b'{"index": 0, "input": {"type": "text", "text": "a"}}',) * 2),
        b'{"items": %s}' % (b"[" * 5000 + b"]" * 5000),
        b'{"new": %s}' % (b"[" * 5000 + b"]" * 5000),
    ],
    ids=lambda data: data[:40],
)
def test_body_that_is_no_job(data: bytes) -> None:
    _, attributes = encode_job(job())
    with pytest.raises(UndecodableMessage) as caught:
        decode_job(data, attributes)
    assert caught.value.field == "data"


def test_replies_with_invalid_letters() -> None:
    data, attributes = encode_reply(Reply("req_1", 0, "17", ReplyBody([failed("xx")])))
    broken = data.replace(b"xx", b"\xff\xfe")
    assert broken != data
    with pytest.raises(UndecodableMessage):
        decode_reply(broken, attributes)
    with pytest.raises(UndecodableMessage):
        decode_reply_body(broken)


def test_reply_that_is_nested_too_deeply() -> None:
    depth = 100_000  # since 3.12, Python decodes almost 10,000 levels instead of 1,000
    body = b'{"outcomes": [], "new": %s}' % (b"[" * depth + b"]" * depth)
    with pytest.raises(UndecodableMessage):
        decode_reply_body(body)


def failed(message: str) -> ItemOutcome:
    return failure(0, BadInput(message, field="input"), Receipt())


@pytest.mark.parametrize(
    "change", [{"schema": "2"}, {"request_id": None}, {"part": None}, {"part": "x"}], ids=str
)
def test_reply_without_its_attributes(change: dict[str, str | None]) -> None:
    data, attributes = encode_reply(Reply("req_1", 0, "17", ReplyBody([])))
    changed = {name: value for name, value in (attributes | change).items() if value is not None}
    with pytest.raises(UndecodableMessage):
        decode_reply(data, changed)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DeadlineExceeded(), "expired"),
        (BadInput("no", field="input"), "failed"),
        (PenstockError(), "failed"),
    ],
)
def test_failure_carries_the_error(error: PenstockError, status: str) -> None:
    outcome = failure(3, error)
    assert (outcome.index, outcome.status, outcome.result) == (3, status, None)
    assert outcome.error == ItemError(error.code, error.public_message, error.field)


def test_row_tells_times_apart() -> None:
    receipt = Receipt("miss", pulled_at_s=100.75, batch_wait_ms=2.0, inference_ms=7.0, tokens=4)
    outcome = ItemOutcome(2, "succeeded", receipt, result=EmbeddingResult(b"", 4))
    row = row_of(
        job(attempt=2).envelope, outcome, MINI, replied_at_s=101.0, worker="w", region="local"
    )
    assert row.row_id == "req_1:2"
    assert (row.queue_ms, row.total_ms) == (250.0, 1000.0)
    assert (row.batch_wait_ms, row.inference_ms, row.tokens) == (2.0, 7.0, 4)
    assert (row.worker, row.region, row.attempt, row.error_code) == ("w", "local", 2, None)
    assert not any(
        isinstance(v, float) and math.isnan(v) for v in msgspec.structs.asdict(row).values()
    )


def test_row_of_a_failure_has_its_code() -> None:
    row = row_of(job().envelope, failure(0, BadInput("no")), MINI, replied_at_s=101.0)
    assert (row.status, row.error_code) == ("failed", "invalid_input")


@pytest.mark.parametrize("cached_share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("status", ["succeeded", "failed", "expired", "canceled"])
@pytest.mark.parametrize("cache", ["miss", "none", "memory", "redis", "joined"])
def test_charge_is_for_what_was_delivered(cache: str, status: str, cached_share: float) -> None:
    model = MINI.model_copy(
        update={"price": Price(per_million_tokens_usd=2.0, cached_share=cached_share)}
    )
    outcome = ItemOutcome(0, status, Receipt(cache, tokens=500_000))
    row = row_of(job().envelope, outcome, model)
    share = 0.0 if status != "succeeded" else 1.0 if cache in ("miss", "none") else cached_share
    assert (row.tokens, row.charged_share, row.cost_usd) == (500_000, share, share * 1.0)
