"""Model revisions withdrawn by an operator, in one Redis hash for all processes.

A withdrawn revision does no work: the API rejects new requests, and waiting callers get the same
error. Its cached results are never read again. Result keys include how many times their revision
was withdrawn (shared/stores/cache.py). So there is no need to search for entries in Redis or in
processes' memory, and a result on its way into the cache isn't found either. The entries themselves
expire as usual.

The hash has no TTL, so Redis doesn't evict it. The counts remain after a withdrawal ends. So if the
hash is missing, it must have been lost, and processes keep their snapshots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Self

import msgspec
from prometheus_client import Counter, Gauge

from shared.errors import MALFORMED, ModelWithdrawn, Unavailable, UndecodableMessage
from shared.models.catalog import Model
from shared.process.concurrency import BackgroundTask, sleep_until_turn
from shared.stores.redis_client import KEY_PREFIX, NO_REDIS, RedisLink, RedisStore, load_script

REFRESH_S = 1.0
"""A withdrawal takes effect within this time plus the duration of one read."""
READ_LIMIT_S = 2.0

ERRORS = Counter(
    "penstock_withdrawals_errors_total",
    "Failed round trips to Redis about withdrawn models, by operation.",
    ["operation"],
)
UP = Gauge(
    "penstock_withdrawals_redis_up",
    "1 while Redis is being asked about withdrawn models, 0 while the breaker is open.",
)
WITHDRAWN = Gauge("penstock_models_withdrawn", "Withdrawn model revisions known to this process.")
_WITHDRAW = load_script("shared/stores/withdraw.lua")
_WITHDRAWN, _PURGES = b"withdrawn:", b"purges:"
log = logging.getLogger(__name__)


class Withdrawal(msgspec.Struct, frozen=True):
    """A withdrawn revision."""

    model: str
    revision: str
    at_s: float
    """Unix seconds."""
    by: str
    """Name of the person who withdrew it."""


class Withdrawals(msgspec.Struct, frozen=True):
    """Snapshot of withdrawn revisions and withdrawal counts, keyed by `revision_id`."""

    withdrawn: Mapping[str, Withdrawal] = msgspec.field(default_factory=dict)
    purges: Mapping[str, int] = msgspec.field(default_factory=dict)


def revision_id(model: str, revision: str) -> str:
    """Returns a revision's name in the hash. Model names never contain a colon."""
    return f"{model}:{revision}"


class WithdrawalStore(RedisStore):
    """The hash: an async context manager that opens even without Redis."""

    def __init__(self, redis_url: str, *, retry_s: float = 0.25) -> None:
        super().__init__(
            RedisLink(
                "withdrawals", redis_url, retry_s=retry_s, up=UP, errors=ERRORS, field="records_url"
            )
        )
        self._key = f"{KEY_PREFIX}models:withdrawn"
        self._commands = self._link.commands("the withdrawal store")

    async def read(self) -> Withdrawals | None:
        """Returns all withdrawals. None if there were never any, or if Redis has lost them.

        Fields that a newer release adds are skipped.

        Raises:
            UndecodableMessage: a field can't be read.
            Unavailable: Redis did not respond.
        """
        fields = await self._commands.run("HGETALL", self._key)
        if not fields:
            return None
        withdrawn, purges = dict[str, Withdrawal](), dict[str, int]()
        try:
            for name, value in fields.items():
                if name.startswith(_WITHDRAWN):
                    withdrawal = msgspec.json.decode(value, type=Withdrawal)
                    withdrawn[name.removeprefix(_WITHDRAWN).decode()] = withdrawal
                elif name.startswith(_PURGES):
                    purges[name.removeprefix(_PURGES).decode()] = int(value)
        except (*MALFORMED, ValueError) as error:
            raise UndecodableMessage(f"{self._key}: {error}") from error
        return Withdrawals(withdrawn, purges)

    async def withdraw(self, withdrawal: Withdrawal) -> bool:
        """Withdraws a revision. Returns whether it was newly withdrawn.

        Raises:
            Unavailable: Redis did not respond, but may have withdrawn it.
        """
        name = revision_id(withdrawal.model, withdrawal.revision).encode()
        args = (_WITHDRAWN + name, _PURGES + name, msgspec.json.encode(withdrawal))
        return bool(await self._commands.run_script(_WITHDRAW, [self._key], *args))

    async def undo(self, model: str, revision: str) -> bool:
        """Ends a withdrawal. Returns whether there was a withdrawal to end.

        Raises:
            Unavailable: Redis did not respond, but may have ended it.
        """
        field = _WITHDRAWN + revision_id(model, revision).encode()
        return bool(await self._commands.run("HDEL", self._key, field))


class LiveWithdrawals:
    """Current withdrawals. An async context manager that reads the withdrawals every REFRESH_S.

    While Redis is unreachable, the last snapshot remains in use. A process that starts during that
    time has no snapshot.
    """

    def __init__(self, store: WithdrawalStore, *, refresh_s: float = REFRESH_S) -> None:
        self._store = store
        self._refresh_s = refresh_s
        self._known = Withdrawals()
        self._failure = ""
        self._listeners: list[Callable[[], None]] = []
        self._refreshing = BackgroundTask("looking at withdrawn models", self._run)

    async def __aenter__(self) -> Self:
        await self._store.__aenter__()
        await self.refresh()
        self._refreshing.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._refreshing.stop()
        await self._store.__aexit__(*exc)

    def on_withdrawn(self, act: Callable[[], None]) -> None:
        """Registers `act` to be called on every new withdrawal, to stop work in progress."""
        self._listeners.append(act)

    def is_withdrawn(self, model: Model) -> bool:
        """Returns whether this revision of a model is withdrawn."""
        known = self._known.withdrawn
        return bool(known) and revision_id(model.entry_name, model.revision) in known

    def check(self, model: Model) -> None:
        """Rejects a model whose revision is withdrawn."""
        if self.is_withdrawn(model):
            raise withdrawn_error(model)

    def purges(self, model: Model) -> int:
        """Returns how many times this revision has been withdrawn.

        Results cached before the last withdrawal are not read.
        """
        known = self._known.purges
        return known.get(revision_id(model.entry_name, model.revision), 0) if known else 0

    async def refresh(self) -> None:
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                read = await self._store.read()
        except (TimeoutError, Unavailable, UndecodableMessage) as error:
            self._note(str(error) or f"no response within {READ_LIMIT_S:g} s")
            return
        if read is None:
            # Otherwise, results of withdrawn revisions would be served again.
            self._note("Redis has lost them" if self._known.purges else "")
            return
        self._note("")
        is_more = not read.withdrawn.keys() <= self._known.withdrawn.keys()
        if read.withdrawn != self._known.withdrawn:
            names = sorted(read.withdrawn)
            log.warning("withdrawn models changed", extra={"withdrawn": names})
        self._known = read
        WITHDRAWN.set(len(read.withdrawn))
        if is_more:
            for act in self._listeners:
                act()

    def _note(self, failure: str) -> None:
        if failure and failure != self._failure:
            facts = {"reason": failure}
            log.warning("could not read withdrawn models; keeping the last known ones", extra=facts)
        self._failure = failure

    async def _run(self) -> None:
        while True:
            await sleep_until_turn(self._refresh_s)
            await self.refresh()


def withdrawn_error(model: Model) -> ModelWithdrawn:
    """Returns the error for new or waiting requests to a withdrawn revision."""
    return ModelWithdrawn(
        f"model {model.public_name!r} was withdrawn by the operator of this API; it is "
        "unavailable until another revision is served or this one is restored",
        field="model",
    )


def no_withdrawals() -> LiveWithdrawals:
    """Returns an instance with no withdrawals, for tests and tools.

    There's no need to enter it as a context manager.
    """
    return LiveWithdrawals(WithdrawalStore(NO_REDIS))
