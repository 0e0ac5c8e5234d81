"""Group commit: changes accumulate while a transaction is written, and form the next one.

This layer sits between the broker, which records each change, and the file. Publishes get their
response once they are committed.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial

from pubsub_emulator.errors import ServerUnavailable
from pubsub_emulator.state.journal import ChangeJournal, Resource
from pubsub_emulator.state.message import StoredMessage
from pubsub_emulator.storage.changes import Changes
from pubsub_emulator.storage.commit_thread import CommitThread
from pubsub_emulator.storage.database import Database, WriteFailed

LAZY_S = 0.1
"""How long acks and attempts wait for a publish, and the pause between retries on a full disk."""
COMMIT_LIMIT_S = 30.0
MAX_UNWRITTEN_BYTES = 64 * 1024**2
"""Maximum number of bytes waiting to be written. Publishes that exceed it are rejected."""

Withdraw = Callable[[Collection[int]], None]

_log = logging.getLogger(__name__)


class DurableJournal(ChangeJournal):
    """A broker's journal in a data directory.

    Args:
        database: the open file. Nothing else may write to it while `running`.
        commit_limit_s: how long a transaction may take before the disk is considered to be failing.
    """

    def __init__(self, database: Database, commit_limit_s: float = COMMIT_LIMIT_S) -> None:
        self._database = database
        self._commit_limit_s = commit_limit_s
        self._pending = Changes()
        self._writing = Changes()
        self._failure = ""
        self._is_due = False
        self._woken = asyncio.Event()
        self._is_closing = False

    def save(self, resource: Resource) -> None:
        """Record that a resource was created or changed."""
        row = (resource.holder, resource.moment_s, resource.proto.SerializeToString())
        self._pending.resources[resource.path] = row

    def erase(self, path: str) -> None:
        """Record that a resource was deleted."""
        self._pending.resources[path] = None

    def keep(self, message: StoredMessage) -> None:
        """Record a new message. The message remains until it is dropped."""
        self._pending.keep(message.sequence, message.serialized)

    def drop(self, sequence: int) -> None:
        """Record that no subscription or snapshot holds a message anymore."""
        self._pending.drop(sequence)

    def offered(self, sequence: int) -> None:
        """Record that a message's publisher is waiting for the response.

        Until the response is sent, the message may be rolled back.
        """
        self._pending.offered.add(sequence)

    def hold(self, message: StoredMessage, holder: int, number: int = 0, attempts: int = 0) -> None:
        """Record that a resource holds a message: the delivery number and attempts, or `ACKED`."""
        self._pending.held[message.sequence, holder] = (number, attempts)

    def release(self, message: StoredMessage, holder: int) -> None:
        """Record that a resource no longer holds a message."""
        self._pending.release(message.sequence, holder)

    def admit(self) -> None:
        """Reject a call whose changes must be durable, before it changes anything.

        Raises:
            ServerUnavailable: the last commit failed, or too much data is waiting for the disk.
        """
        if self._failure:
            raise _unavailable(self._failure)
        unwritten_bytes = self._pending.size_bytes + self._writing.size_bytes
        if unwritten_bytes > MAX_UNWRITTEN_BYTES:
            raise _unavailable(f"{unwritten_bytes} bytes are waiting to be written to disk")

    async def committed(self) -> None:
        """Wait until everything recorded so far is in the file.

        Raises:
            ServerUnavailable: the changes could not be written and offered messages were rolled
                back, or the write timed out.
        """
        await self._written(self._pending)

    async def acks_committed(self) -> None:
        """Wait until all acks recorded so far are in the file.

        On a full disk, the first commit fails, so messages are rolled back and space is freed. The
        next commit contains the acks.

        Raises:
            ServerUnavailable: the acks could not be written in time, or could not be written even
                with all space freed. The acks are kept for later.
        """
        changes = self._pending
        try:
            await self._written(changes)
        except ServerUnavailable:
            if changes.again_in is None:
                raise
            await self._written(changes.again_in)

    async def _written(self, changes: Changes) -> None:
        self._ask()
        await changes.wait()
        if changes.error:
            raise _unavailable(changes.error)

    def after_commit(self, act: Callable[[], None]) -> None:
        """Call `act` once everything recorded so far is in the file. Waiting callers go first."""
        self._pending.afterwards.append(act)
        self._ask()

    def flush(self) -> None:
        """Write recorded changes immediately, for a journal that is not running.

        Raises:
            WriteFailed: SQLite failed for the reason given, even with all possible space freed.
        """
        changes, self._pending = self._pending, Changes()
        try:
            self._database.write(changes)
        except WriteFailed:
            self._database.make_room()
            self._database.write(changes)

    @asynccontextmanager
    async def running(self, withdraw: Withdraw) -> AsyncIterator[None]:
        """Commit repeatedly until the block ends, then once more.

        Args:
            withdraw: removes messages, by sequence number, from all holders.
        """
        try:
            self._database.take_reserve()
        except WriteFailed as error:
            self._failed(str(error), withdraw)
        with CommitThread() as thread:
            committing = asyncio.create_task(self._run(withdraw, thread))
            committing.add_done_callback(self._ended)
            try:
                yield
            finally:
                self._is_closing = True
                self._ask()
                async with asyncio.timeout(self._commit_limit_s):
                    await committing

    def _ask(self) -> None:
        self._is_due = True
        self._woken.set()

    async def _run(self, withdraw: Withdraw, thread: CommitThread) -> None:
        is_last = has_spare_pages = False
        while not is_last:
            is_last = self._is_closing
            if not (is_last or self._is_due):
                await self._wait()
            is_idle = not (self._is_due or self._pending or self._failure)
            self._is_due = False
            try:
                if not is_idle:
                    has_spare_pages = True
                    await self._commit(thread)
                elif has_spare_pages:
                    has_spare_pages = await thread.do(self._database.shrink)
            except WriteFailed as error:
                self._failed(str(error), withdraw)

    async def _wait(self) -> None:
        """Wait until a commit is due, up to `LAZY_S`."""
        self._woken.clear()
        # Avoids `asyncio.timeout`, which is several times slower; this runs before each commit.
        timer = asyncio.get_running_loop().call_later(LAZY_S, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()

    async def _commit(self, thread: CommitThread) -> None:
        self._writing, self._pending = self._pending, Changes()
        if self._failure:
            await thread.do(self._database.make_room)
        if self._writing:
            hung = asyncio.get_running_loop().call_later(self._commit_limit_s, self._hung)
            try:
                await thread.do(partial(self._database.write, self._writing))
            finally:
                hung.cancel()
        # Not called directly, so that commits continue no matter what an action does.
        call_soon = asyncio.get_running_loop().call_soon
        self._writing.settle()
        for act in self._writing.afterwards:
            call_soon(act)
        self._writing = Changes()
        if self._failure:
            await self._resume(thread)

    async def _resume(self, thread: CommitThread) -> None:
        # Release pages that acks left unused, so that newly accepted messages don't have to be
        # rolled back again.
        try:
            await thread.do(self._database.give_back)
            await thread.do(self._database.probe)
            await thread.do(self._database.take_reserve)
        except WriteFailed as error:
            # Only acks arrived in the meantime, and they will go into the next commit.
            self._failure = str(error)
        else:
            self._failure = ""
            _log.warning("the data directory can be written again")

    def _hung(self) -> None:
        self._failure = f"writing to disk took longer than {self._commit_limit_s:g} s"
        _log.error("the data directory does not answer, so publishes are refused")
        for changes in (self._writing, self._pending):
            changes.settle(self._failure)

    def _failed(self, error: str, withdraw: Withdraw) -> None:
        refused, is_first = (self._writing, self._pending), not self._failure
        if is_first:
            _log.error(
                "the data directory can't be written, so publishes are refused",
                extra={"error": error},
            )
        self._failure = error
        # Acks and attempts are kept for the next try. Publishers are notified of the failure and
        # will send their messages again.
        self._pending = self._writing.followed_by(self._pending)
        self._writing = Changes()
        offered, self._pending.offered = self._pending.offered, set()
        if offered:
            withdraw(offered)
        for changes in refused:
            changes.again_in = self._pending if is_first else None
            changes.settle(error)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = "the commits ended; this is a bug"
            _log.error("commits failed, this is a bug", exc_info=task.exception())
            self._writing.settle(self._failure)
            self._pending.settle(self._failure)


def _unavailable(reason: str) -> ServerUnavailable:
    return ServerUnavailable(
        f"The embedded server can't store anything new in its data directory right now: {reason}."
    )
