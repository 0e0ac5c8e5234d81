"""Files returned by a custom class count toward the tenant's storage quota."""

import time
from pathlib import Path

import pytest

from api.inputs import storage as storage_module
from api.inputs.storage import Storage
from shared.messages import Envelope, ItemOutcome, Receipt
from shared.models.blob import INLINE_LIMIT_BYTES, Blob
from shared.models.tasks.custom import CustomResult, FilePlace
from shared.stores.held_bytes import hold
from shared.stores.objects import ObjectStore
from workers.jobs.large_results import RESULTS_COUNT_S, LargeResults

pytestmark = pytest.mark.anyio
FILE_BYTES = INLINE_LIMIT_BYTES + 1


def envelope(*, prediction: str = "", flow: str = "") -> Envelope:
    now_s = time.time()
    return Envelope(
        request_id="r1",
        prediction=prediction,
        flow=flow,
        tenant="acme",
        received_at_s=now_s,
        part=0,
        model="mine",
        deadline_s=now_s + 60,
        published_at_s=now_s,
    )


@pytest.mark.parametrize(
    ("of", "counted"),
    [({"prediction": "p1"}, 2 * FILE_BYTES), ({"flow": "f"}, 2 * FILE_BYTES), ({}, 0)],
)
async def test_files_of_predictions_and_flows_count_until_they_are_gone(
    tmp_path: Path, of: dict[str, str], counted: int
) -> None:
    """Files in a response that a caller is waiting for are not stored for the tenant."""
    objects = ObjectStore(f"file://{tmp_path}")
    now_s = time.time()
    storage = Storage(objects, clock=lambda: now_s)
    files = [Blob("audio/wav", data=bytes([n]) * FILE_BYTES) for n in range(2)]
    small = Blob("text/plain", data=b"in the record")
    result = CustomResult(
        ["", "", ""], [*files, small], [FilePlace([n], f"{n}.wav") for n in range(3)]
    )
    results = LargeResults(objects, reply_limit_bytes=INLINE_LIMIT_BYTES, keep_limit_s=1.0)
    outcome = ItemOutcome(0, "succeeded", Receipt(), result=result)
    stored = await results.store(envelope(**of), outcome)
    assert stored.result is not None
    assert [blob.object_key is None for blob in stored.result.blobs] == [False, False, True]
    assert (await storage.use("acme")).size_bytes == counted
    assert (await storage.use("other")).size_bytes == 0
    now_s += 60 + RESULTS_COUNT_S + 2
    assert (await storage.use("acme")).size_bytes == 0
    await storage.sweep()
    assert not await objects.listing("files/held", 10), "the markers are removed"


async def test_every_file_counts_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that have expired but haven't been removed yet don't hide other files."""
    monkeypatch.setattr(storage_module, "MAX_FILES", 3)
    objects, now_s = ObjectStore(f"file://{tmp_path}"), 2_000_000_000.0
    storage = storage_module.Storage(objects, clock=lambda: now_s)
    for number in range(20):
        await hold(objects, "acme", 7, now_s - number)
    for number in range(30):
        await hold(objects, "acme", 100, now_s + 1 + number % 3)
    assert (await storage.use("acme")).size_bytes == 3000
