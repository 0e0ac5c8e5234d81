"""Documents that a batch refers to."""

from pathlib import Path

import pytest

from api.batches.documents import HEADER_BYTES, Counts, decode_header, encode_segment
from api.batches.names import RUNS
from api.batches.store import BatchStore
from shared.stores.objects import ObjectStore


def test_counts_of_the_largest_batch_fit_the_head_of_a_segment() -> None:
    """Readers fetch only the first bytes of a segment."""
    lines, amount = 10**6, 10**12
    counts = Counts(lines, lines, lines, amount, amount, amount, amount, amount)
    data = encode_segment(counts, [])
    assert len(data) == HEADER_BYTES
    assert decode_header(data).counts == counts


@pytest.mark.anyio
async def test_foreign_files_in_the_folder_of_a_batch_are_ignored(tmp_path: Path) -> None:
    objects, names = ObjectStore(f"file://{tmp_path}"), ("owner", "batch_1")
    store = BatchStore(objects)
    await store.begin_segment(*names, 2)
    key = await store.log_answers(*names, 0, "a", Counts(), {})
    for folder in ("begun", "answers"):
        for name in ("0-notes.txt", "notes.txt"):
            await objects.put(f"{RUNS}/owner/batch_1/{folder}/{name}", b"", "text/plain")
    assert await store.count_begun_segments(*names) == 3
    assert await store.answer_logs(*names) == [(0, key)]
