"""A batch's answers that have not yet been written to a segment.

Lines finish in any order, and a segment is written once all of its lines and all earlier segments
are finished. Until then, new answers are logged about once a second. Each log is an object that is
written once. As a result, a runner that takes over loses at most one second of answers, the counts
that callers see keep advancing, and memory use stays bounded no matter how long the slowest line
takes.

Calls raise Unavailable if the object store is unreachable.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence

from api.batches.documents import Counts, LineAnswer, counts_after
from api.batches.store import BatchStore
from shared.errors import Unavailable

READ_AT_ONCE = 8
FLUSH_BYTES = 4 * 1024 * 1024
"""Total size, in bytes, at which new answers are logged before the second is up."""
KEPT_BYTES = 16 * 1024 * 1024
"""Maximum size, in bytes, of logged answers kept in memory. Other answers are reread when needed.
"""


class AnswerLog:
    """One batch's answers. `open` must be called first.

    Args:
        counts: counts for all written segments.
    """

    def __init__(self, store: BatchStore, owner: str, batch_id: str, counts: Counts) -> None:
        self._store = store
        self._batch = (owner, batch_id)
        self.counts = counts
        """Counts for all finished lines."""
        self._kept: dict[int, LineAnswer] = {}
        """Answers in memory, keyed by line number."""
        self._kept_bytes = 0
        self._new: set[int] = set()
        """Line numbers of answers that are not yet logged."""
        self._new_bytes = 0
        self._logged: dict[int, str] = {}
        """The log that contains each answer, keyed by line number."""
        self._open_lines: dict[str, int] = {}
        """Number of lines in each log that are not part of a written segment, oldest log first."""
        self._numbers = itertools.count()
        self._holder = secrets.token_hex(4)
        self._flushing = asyncio.Lock()

    async def open(self, earlier: Mapping[int, LineAnswer], first_line: int) -> None:
        """Reads the answers that earlier runners logged.

        Args:
            earlier: answers stored elsewhere, keyed by line number.
            first_line: number of the first line that is not yet part of a written segment.
        """
        logs = await self._store.answer_logs(*self._batch)
        if logs:
            self._numbers = itertools.count(logs[-1].number + 1)
        for at in range(0, len(logs), READ_AT_ONCE):
            some = logs[at : at + READ_AT_ONCE]
            read = await asyncio.gather(*(self._store.read_logged_answers(log.key) for log in some))
            for log, answers in zip(some, read, strict=True):
                self._add_logged(log.key, answers, first_line)
        for number, answer in earlier.items():
            if number not in self:
                self.add(number, answer)

    def _add_logged(self, key: str, answers: Mapping[int, LineAnswer], first_line: int) -> None:
        self._open_lines[key] = 0
        for number, answer in answers.items():
            if number >= first_line and number not in self:
                self.counts = counts_after(self.counts, [answer])
                self._logged[number] = key
                self._open_lines[key] += 1
                self._keep(number, answer)
        self._drop_logged()

    def __contains__(self, number: int) -> bool:
        """Returns whether the answer to a line is known."""
        return number in self._kept or number in self._logged

    @property
    def is_due(self) -> bool:
        """True if so many answers are waiting that they should be logged without further delay."""
        return self._new_bytes >= FLUSH_BYTES

    def add(self, number: int, answer: LineAnswer) -> None:
        """Adds the answer to a finished line."""
        self.counts = counts_after(self.counts, [answer])
        self._keep(number, answer)
        self._new.add(number)
        self._new_bytes += len(answer.data)

    def _keep(self, number: int, answer: LineAnswer) -> None:
        self._kept[number] = answer
        self._kept_bytes += len(answer.data)

    async def flush(self) -> None:
        """Logs the answers added since the last log."""
        async with self._flushing:
            numbers = sorted(self._new)
            if not numbers:
                return
            new = {number: self._kept[number] for number in numbers}
            number, holder = next(self._numbers), self._holder
            key = await self._store.log_answers(*self._batch, number, holder, self.counts, new)
            # Some may have been dropped in the meantime because their segment was written.
            remaining = [number for number in numbers if number in self._new]
            self._new.difference_update(remaining)
            self._new_bytes -= sum(len(new[number].data) for number in remaining)
            self._logged |= dict.fromkeys(remaining, key)
            self._open_lines[key] = len(remaining)
            self._drop_logged()

    def _drop_logged(self) -> None:
        """Keeps up to KEPT_BYTES of logged answers in memory.

        The last lines are needed last.
        """
        if self._kept_bytes <= KEPT_BYTES:
            return
        for number in sorted(self._kept.keys() - self._new, reverse=True):
            self._kept_bytes -= len(self._kept.pop(number).data)
            if self._kept_bytes <= KEPT_BYTES:
                return

    async def read(self, numbers: Sequence[int]) -> list[LineAnswer]:
        """Returns the answers to lines, all of which must be finished.

        Raises:
            Unavailable: the object store is unreachable, or another runner has written the segment
                and deleted a log.
        """
        answers = {number: self._kept[number] for number in numbers if number in self._kept}
        for key in sorted({self._logged[number] for number in numbers if number not in answers}):
            logged = await self._store.read_logged_answers(key)
            of_log = [number for number in numbers if self._logged.get(number) == key]
            if not logged.keys() >= set(of_log):
                raise Unavailable("the batch's logged answers no longer exist")
            answers |= {number: logged[number] for number in of_log}
        return [answers[number] for number in numbers]

    async def forget(self, numbers: Sequence[int]) -> None:
        """Forgets lines whose segment has been written, and deletes logs that are no longer needed.

        The newest log is kept, because it contains the counts that callers see.
        """
        for number in numbers:
            answer, key = self._kept.pop(number, None), self._logged.pop(number, None)
            if answer is not None:
                self._kept_bytes -= len(answer.data)
                if number in self._new:
                    self._new.discard(number)
                    self._new_bytes -= len(answer.data)
            if key is not None:
                self._open_lines[key] -= 1
        for key in [key for key, lines in list(self._open_lines.items())[:-1] if lines == 0]:
            await self._store.delete_log(key)
            del self._open_lines[key]
