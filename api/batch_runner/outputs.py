"""Composes a batch's segments into its output and error files."""

from __future__ import annotations

import time
from collections.abc import Sequence

from api.batches.documents import HEADER_BYTES, BatchCreated
from api.batches.files import JSONL, READ_BYTES, BatchFile, BatchFiles, data_key
from api.batches.names import new_file_id
from api.batches.store import BatchStore
from shared.stores.objects import ObjectStore, StoredObject


class Outputs:
    """Writes batch output files once all lines are finished."""

    def __init__(self, objects: ObjectStore, store: BatchStore, files: BatchFiles) -> None:
        self._objects = objects
        self._store = store
        self._files = files

    async def compose(
        self, batch: BatchCreated, model: str, segments: Sequence[StoredObject]
    ) -> tuple[str, str]:
        """Writes the files in line order. Running this again writes identical files.

        Returns:
            IDs of the output file and the error file. The ID of a file without lines is empty.

        Raises:
            Unavailable: the object store is unreachable.
        """
        headers = [await self._store.header(segment) for segment in segments]
        outputs = [
            (segment, HEADER_BYTES, header.output_bytes)
            for segment, header in zip(segments, headers, strict=True)
        ]
        errors = [
            (segment, HEADER_BYTES + header.output_bytes, header.error_bytes)
            for segment, header in zip(segments, headers, strict=True)
        ]
        return (
            await self._write(batch, model, "output", outputs),
            await self._write(batch, model, "error", errors),
        )

    async def _write(
        self,
        batch: BatchCreated,
        model: str,
        kind: str,
        parts: Sequence[tuple[StoredObject, int, int]],
    ) -> str:
        if not any(length for _, _, length in parts):
            return ""
        # Named after the batch, so that composing it again overwrites the same file.
        file_id = new_file_id(batch.created_at_s, f"{batch.id} {kind}")
        async with self._objects.writer(data_key(batch.tenant, file_id), JSONL) as writer:
            for segment, start, length in parts:
                for at in range(start, start + length, READ_BYTES):
                    size_bytes = min(READ_BYTES, start + length - at)
                    await writer.write(await self._objects.get_range(segment.key, at, size_bytes))
        now_s = time.time()
        await self._files.add(
            BatchFile(
                id=file_id,
                tenant=batch.tenant,
                filename=f"{batch.id}_{kind}.jsonl",
                purpose="batch_output",
                size_bytes=writer.size_bytes,
                created_at_s=now_s,
                expires_at_s=now_s + batch.output_keep_s,
                model=model,
            )
        )
        return file_id
