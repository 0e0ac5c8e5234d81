"""Revisions of models that an operator has withdrawn, in one hash in Redis, for all processes.

A withdrawn revision computes nothing: the API refuses new requests, and whoever waits for it gets
the same error. What the cache has of it is never read again. Keys of results have the number of
times that their revision was withdrawn (shared/stores/cache.py), so nothing needs to be looked for,
in Redis or in the memory of processes, and a result that is on its way into the cache is not found
either. The entries themselves expire as they would have.

The hash has no TTL, so Redis evicts none of it. It keeps the numbers when a withdrawal ends. So a
hash that is gone was lost, and processes keep what they know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Self

import msgspec
from prometheus_client import Counter, Gauge

from shared.catalog import Model
from shared.concurrency import BackgroundTask
from shared.errors import ModelWithdrawn, Unavailable, UndecodableMessage
from shared.stores.redis_client import KEY_PREFIX, NO_REDIS, RedisLink, RedisStore, load_script

REFRESH_S = 1.0
"""A withdrawal takes effect within this time and that of a read."""
READ_LIMIT_S = 2.0

ERRORS = Counter(
    "penstock_withdrawals_errors_total",
    "Round trips to Redis about withdrawn models that failed, by operation.",
    ["operation"],
)
UP = Gauge(
    "penstock_withdrawals_redis_up",
    "1 while Redis is being asked about withdrawn models, 0 while the breaker is open.",
)
WITHDRAWN = Gauge(
    "penstock_models_withdrawn", "Revisions of models that are withdrawn, as this process knows."
)
_WITHDRAW = load_script("shared/stores/withdraw.lua")
_WITHDRAWN, _PURGES = b"withdrawn:", b"purges:"
log = logging.getLogger(__name__)


class Withdrawal(msgspec.Struct, frozen=True):
    """A revision that is withdrawn."""

    model: str
    revision: str
    at_s: float
    """Unix seconds."""
    by: str
    """Who did it, in words."""


class Withdrawals(msgspec.Struct, frozen=True):
    """What is known: withdrawn revisions and numbers of withdrawals, by `revision_id`."""

    withdrawn: Mapping[str, Withdrawal] = msgspec.field(default_factory=dict)
    purges: Mapping[str, int] = msgspec.field(default_factory=dict)


def revision_id(model: str, revision: str) -> str:
    """Returns the name of a revision in the hash. Neither part has a colon in a model's name."""
    return f"{model}:{revision}"


class WithdrawalStore(RedisStore):
    """The hash: an async context manager that opens without Redis too.

    Args:
        redis_url: `redis://`, `rediss://` or `unix://` URL.
        retry_s: bound of the first pause of the background retry.
    """

    def __init__(self, redis_url: str, *, retry_s: float = 0.25) -> None:
        super().__init__(
            RedisLink(
                "withdrawals", redis_url, retry_s=retry_s, up=UP, errors=ERRORS, field="records_url"
            )
        )
        self._key = f"{KEY_PREFIX}models:withdrawn"
        self._commands = self._link.commands("the store of withdrawn models")

    async def read(self) -> Withdrawals | None:
        """Returns what is withdrawn. None: nothing ever was, or Redis has lost it.

        Raises:
            UndecodableMessage: a field can't be read.
            Unavailable: Redis did not answer.
        """
        fields = await self._commands.run("HGETALL", self._key)
        if not fields:
            return None
        withdrawn, purges = dict[str, Withdrawal](), dict[str, int]()
        try:
            for name, value in fields.items():
                if name.startswith(_WITHDRAWN):
                    one = msgspec.json.decode(value, type=Withdrawal)
                    withdrawn[name.removeprefix(_WITHDRAWN).decode()] = one
                else:
                    purges[name.removeprefix(_PURGES).decode()] = int(value)
        except (msgspec.MsgspecError, ValueError) as error:
            raise UndecodableMessage(f"{self._key}: {error}") from error
        return Withdrawals(withdrawn, purges)

    async def withdraw(self, withdrawal: Withdrawal) -> bool:
        """Withdraws a revision. Returns whether it was not withdrawn before.

        Raises:
            Unavailable: Redis did not answer. It may be withdrawn all the same.
        """
        name = revision_id(withdrawal.model, withdrawal.revision).encode()
        args = (_WITHDRAWN + name, _PURGES + name, msgspec.json.encode(withdrawal))
        return bool(await self._commands.run_script(_WITHDRAW, [self._key], *args))

    async def undo(self, model: str, revision: str) -> bool:
        """Ends a withdrawal. Returns whether there was one.

        Raises:
            Unavailable: Redis did not answer. It may have ended all the same.
        """
        field = _WITHDRAWN + revision_id(model, revision).encode()
        return bool(await self._commands.run("HDEL", self._key, field))


class LiveWithdrawals:
    """What is withdrawn now. An async context manager that looks every REFRESH_S.

    While Redis is unreachable, what was known before stays. A process that starts meanwhile knows
    of nothing.

    Args:
        store: opened and closed with this object.
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
        """Has `act` called each time that more is withdrawn, to end what is under way."""
        self._listeners.append(act)

    def is_withdrawn(self, model: Model) -> bool:
        """Returns whether this revision of a model is withdrawn."""
        known = self._known.withdrawn
        return bool(known) and revision_id(model.public_name, model.revision) in known

    def check(self, model: Model) -> None:
        """Refuses a model whose revision is withdrawn.

        Raises:
            ModelWithdrawn: it is.
        """
        if self.is_withdrawn(model):
            raise withdrawn_error(model)

    def purges(self, model: Model) -> int:
        """Returns how often this revision was withdrawn: what was cached before is not read."""
        known = self._known.purges
        return known.get(revision_id(model.public_name, model.revision), 0) if known else 0

    async def refresh(self) -> None:
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                read = await self._store.read()
        except (TimeoutError, Unavailable, UndecodableMessage) as error:
            self._note(str(error) or f"no answer in {READ_LIMIT_S:g} s")
            return
        if read is None:
            # Without it, what is withdrawn would be served again.
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
            log.warning("withdrawn models not read; those known before stay so", extra=facts)
        self._failure = failure

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            await self.refresh()


def withdrawn_error(model: Model) -> ModelWithdrawn:
    """The error for those who ask for a withdrawn revision, or wait for it."""
    return ModelWithdrawn(
        f"model {model.public_name!r} has been withdrawn by the operator of this API: it computes "
        "nothing until another revision is served, or this one again",
        field="model",
    )


def no_withdrawals() -> LiveWithdrawals:
    """Returns what knows of nothing, for tests and tools. It need not be entered."""
    return LiveWithdrawals(WithdrawalStore(NO_REDIS))
