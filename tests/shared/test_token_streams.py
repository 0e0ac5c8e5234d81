"""Text tokens in a real Redis: each exists exactly once, with any number of writers and readers."""

import asyncio
import itertools
import zlib
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import Unavailable
from shared.models.tasks.custom import PieceChunk
from shared.models.tasks.text import TokenChunk
from shared.stores.redis_client import NO_REDIS
from shared.stores.stream_chunks import decode_chunk, encode_chunk, merge_chunks
from shared.stores.token_streams import MAX_ITEMS, Delivered, TokenReader, Written
from tests.deleting import delete_ended
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores
from tests.tiers import examples

pytestmark = pytest.mark.anyio
NUMBERS = itertools.count()


def chunk(first: int, *ids: int) -> TokenChunk:
    return TokenChunk(first, list(ids), "".join(f"{one} " for one in ids))


def test_release_0_1_0_reads_pieces_as_tokens() -> None:
    pieces = PieceChunk(2, "a cat", [2, 3])
    data = encode_chunk(pieces)
    tokens = msgspec.msgpack.decode(data, type=TokenChunk)
    assert tokens == TokenChunk(2, [zlib.crc32(b"a "), zlib.crc32(b"cat")], "a cat")
    assert decode_chunk(data) == pieces
    stored = TokenChunk(0, [7, 8], "I see ")  # pieces as 0.1.0 stored them
    assert merge_chunks([stored, pieces], 0) == TokenChunk(0, [7, 8, *tokens.ids], "I see a cat")


async def claimed(stores: RecordStores, times: int = 1) -> str:
    """A prediction claimed by `count` workers."""
    record = f"req_{next(NUMBERS)}"
    await stores.predictions.create(record, "t", b"{}", deadline_s=4e9, keep_s=60)
    for _ in range(times):
        await stores.records.claim([record])
    return record


async def test_tokens_follow_each_other_without_a_gap(redis_url: str) -> None:
    async with RecordStores(redis_url) as stores:
        record, streams = await claimed(stores), stores.tokens
        assert await streams.append([Written(record, 0, 1, chunk(0, 5, 6))]) == [2]
        assert await streams.append([Written(record, 0, 1, chunk(0, 5, 6))]) == [2], "twice"
        assert await streams.append([Written(record, 0, 1, chunk(3, 8))]) == [2], "a gap"
        assert await streams.append([Written(record, 0, 1, chunk(2, 7, 8))]) == [4]
        ((chunks, is_over),) = await streams.read([(record, 0, 0)])
        assert chunks == [chunk(0, 5, 6), chunk(2, 7, 8)]
        assert not is_over
        ((rest, _),) = await streams.read([(record, 0, 2)])
        assert rest == [chunk(2, 7, 8)]


async def test_a_chunk_that_cannot_be_decoded_ends_what_is_read(redis_url: str) -> None:
    async with RecordStores(redis_url) as stores:
        record = await claimed(stores)
        await stores.tokens.append([Written(record, 0, 1, chunk(0, 5))])
        with redis.Redis.from_url(redis_url) as client:
            client.xadd(f"penstock:tokens:{record}:0", {"c": b"\xc1"}, id="2-1")
        ((chunks, is_over),) = await stores.tokens.read([(record, 0, 0)])
        assert (chunks, is_over) == ([chunk(0, 5)], False)
        with pytest.raises(Unavailable, match="written tokens"):
            await stores.tokens.read_written([(record, 0)])


async def test_only_the_latest_claim_may_append(redis_url: str) -> None:
    async with RecordStores(redis_url) as stores:
        record, streams = await claimed(stores, times=2), stores.tokens
        late, current = Written(record, 0, 1, chunk(0, 1)), Written(record, 0, 2, chunk(0, 2))
        assert await streams.append([late]) == [None]
        assert await streams.append([current]) == [1]
        await stores.records.finish(record, "succeeded", b'{"outcomes":[]}')
        assert await streams.append([Written(record, 0, 2, chunk(1, 3))]) == [None]
        ((chunks, is_over),) = await streams.read([(record, 0, 0)])
        assert chunks == [chunk(0, 2)]
        assert is_over


async def test_a_text_that_went_on_is_not_what_killed_the_workers_before(redis_url: str) -> None:
    async with RecordStores(redis_url) as stores:
        record, streams = await claimed(stores, times=3), stores.tokens
        await stores.records.note_alone(record, begins=True)
        assert await streams.append([Written(record, 0, 3, chunk(0, 1))]) == [1]
        (claim,) = await stores.records.claim([record])
        assert claim is not None
        assert (claim.attempt, claim.unfinished, claim.alone) == (4, 1, 0)
        assert await streams.append([Written(record, 0, 4, chunk(0, 1))]) == [1], "nothing new"
        (claim,) = await stores.records.claim([record])
        assert claim is not None
        assert claim.unfinished == 2


async def test_a_deleted_prediction_leaves_no_tokens(redis_url: str) -> None:
    async with RecordStores(redis_url) as stores:
        record, streams = await claimed(stores), stores.tokens
        items = range(MAX_ITEMS)
        await streams.append([Written(record, item, 1, chunk(0, item)) for item in items])
        await streams.mark_read(record)
        assert await streams.is_read(record)
        await stores.records.finish(record, "succeeded", b'{"outcomes":[]}')
        assert await delete_ended(stores, record)
        found = await streams.read([(record, item, 0) for item in items])
        assert [chunks for chunks, _ in found] == [[]] * MAX_ITEMS
        assert not await streams.is_read(record)


async def test_what_was_read_is_counted_if_the_prediction_is_deleted_meanwhile(
    redis_url: str,
) -> None:
    async with RecordStores(redis_url) as stores:
        record, streams = await claimed(stores), stores.tokens
        first = TokenChunk(0, [5, 6], "a b ", input_tokens=9, cached_tokens=4)
        await streams.append([Written(record, 0, 1, first), Written(record, 1, 1, first)])
        await streams.read([(record, 0, 0)])
        await stores.records.cancel(record)
        assert await delete_ended(stores, record)
        assert await streams.end_delivery(record, [0, 1]) == [Delivered(9, 4, 2), None]
        found = await streams.read([(record, 0, 0), (record, 0, 2)])
        assert [one.chunks for one in found] == [[], []]


@pytest.mark.parametrize("end", ["cancel", "fail", "end_delivery"])
async def test_what_was_read_is_counted_and_nothing_else_is_read_after_the_end(
    redis_url: str, end: str
) -> None:
    async with RecordStores(redis_url) as stores:
        record, streams = await claimed(stores), stores.tokens
        first = TokenChunk(0, [5, 6], "a b ", input_tokens=9, cached_tokens=4)
        await streams.append([Written(record, 0, 1, first), Written(record, 1, 1, first)])
        await streams.read([(record, 0, 0)])
        await streams.append([Written(record, 0, 1, chunk(2, 7))])
        assert await streams.read_written([(record, 0), (record, 1)]) == [
            [first, chunk(2, 7)],
            [first],
        ]
        if end == "cancel":
            await stores.records.cancel(record)
        elif end == "fail":
            await stores.records.finish(record, "failed", b'{"outcomes":[]}')
        else:
            await streams.end_delivery(record, [])
        found = await streams.read([(record, 0, 0), (record, 0, 2), (record, 1, 0)])
        assert [one.chunks for one in found] == [[first], [], []]
        assert await streams.end_delivery(record, [0, 1]) == [Delivered(9, 4, 2), None]


async def test_without_redis_nothing_is_raised_to_a_worker() -> None:
    async with RecordStores(NO_REDIS, timeout_s=0.1) as stores:
        assert await stores.tokens.append([Written("r", 0, 1, chunk(0, 1))]) is None


@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(pieces=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=20))
async def test_whatever_is_appended_each_token_is_there_once(
    redis_url: str, pieces: list[tuple[int, int]]
) -> None:
    async with RecordStores(redis_url) as stores:
        assert await stores.records.wait_up(WAIT_LIMIT_S)
        record = await claimed(stores)
        for first, count in pieces:
            made = chunk(first, *range(first, first + count))
            await stores.tokens.append([Written(record, 0, 1, made)])
        ((chunks, _),) = await stores.tokens.read([(record, 0, 0)])
        tokens = [found for found in chunks if isinstance(found, TokenChunk)]
        ids = [one for found in tokens for one in found.ids]
        assert ids == list(range(len(ids)))


async def test_a_canceled_reader_leaves_no_timer(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later, limit_s = loop.call_later, 1234.5

    def note(delay_s: float, *call: Any, **options: Any) -> asyncio.TimerHandle:
        timer = call_later(delay_s, *call, **options)
        if delay_s >= limit_s:
            timers.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", note)
    async with RecordStores(redis_url) as stores:
        reader = TokenReader(stores.tokens)

        async def follow() -> None:
            with reader.follow("r", 1, limit_s) as news:
                await news.take()

        reading = asyncio.create_task(follow())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        assert [timer.cancelled() for timer in timers] == [True]
        for task in reader.tasks:
            task.cancel()


def test_a_chunk_without_tokens_is_merged_with_the_next() -> None:
    parts = [chunk(0, 5), TokenChunk(1, [], "more "), chunk(1, 6)]
    assert merge_chunks(parts, 1) == TokenChunk(1, [6], "more 6 ")
    assert merge_chunks(parts[:2], 1) == parts[1]
    assert merge_chunks([*parts, chunk(2, 7)], 2) == chunk(2, 7)


def test_pieces_are_merged_from_the_middle_of_a_chunk_on() -> None:
    written = [PieceChunk(0, "abcdef", [2, 1, 3]), PieceChunk(3, "gh", [1, 1])]
    assert merge_chunks(written, 1) == PieceChunk(1, "cdefgh", [1, 3, 1, 1])
    assert merge_chunks(written[:1], 2) == PieceChunk(2, "def", [3])
    assert merge_chunks(written, 3) == written[1]
    assert merge_chunks(written, 4) == PieceChunk(4, "h", [1])
    assert merge_chunks(written, 5) is None


def test_a_text_may_contain_the_name_of_a_field() -> None:
    tokens = TokenChunk(0, [5], "the lengths of ids")
    assert decode_chunk(encode_chunk(tokens)) == tokens
