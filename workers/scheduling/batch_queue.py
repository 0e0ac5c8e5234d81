"""Chooses the items in the next batch from the waiting items. Uses no clock and does no I/O.

A batch consists of items that are waiting when a model process becomes idle. Forming a batch never
waits for more items. Tenants share the model by work, not by items:

- **Between tenants**: deficit round robin (Shreedhar and Varghese, "Efficient Fair Queuing Using
Deficit Round-Robin", IEEE/ACM Transactions on Networking 4(3), 1996). A tenant gains a quantum of
work per round, in proportion to its weight. As in Linux's fq_codel (RFC 8290, section 4.2), it may
take items while its deficit is above 0, and pays back any excess in the following rounds. A
tenant's turn therefore doesn't depend on the length of its next item.
- **Within a tenant**: earliest deadline first, then order of arrival for equal deadlines.
- **Keys**: only items with the same key share a batch. The tenant whose turn it is leads with its
    first item, whose key becomes the batch's key. Other items with that key follow in the order of
    their tenants' turns. All of these items are charged, so a tenant gains nothing by using keys.
    As a result, a tenant may run ahead of its turn by at most one batch.
- **Parts**: items that a job brings together are queued as one part. A batch takes as many of a
    part's first items as it would take if each item were queued separately. The other items keep
    the part's place.

Rounds are counted rather than iterated: each tenant stores the number of the first round in which
it may take an item, and a heap orders the tenants by that number. Rounds without an item therefore
cost nothing, regardless of the weights, and a part costs O(log n).

The bounds, with quantum q = budget / HEAVIEST x weight and longest item l:

- For two tenants i, j that are always waiting: |work_i / weight_i - work_j / weight_j| is at most 2
x budget / HEAVIEST + l_i / weight_i + l_j / weight_j. With several keys, add one budget / weight
for each of the two tenants, for the batches that ran ahead of their turn.
- When an item arrives for a tenant without debt and all keys are the same, the batches before the
one with the tenant's first item contain at most 2 x q_j + l_j work from each other tenant j. With
several keys, each such item from another tenant may bring along a whole batch with its key.
- A tenant with nothing waiting keeps no deficit. It keeps any overdraft until its round comes, so
    it can't get more than its share by sending items one at a time.

If a batch completes all of one tenant's items, a tenant with more than a batch of work waiting can
lengthen the batch only by `spare` work, or to at most twice its length.

`TenantQueue` holds one tenant's waiting items and tracks how much of its share the tenant has used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Generic, Protocol, Self, TypeAlias, TypeVar

from shared.tenants.plan import HEAVIEST

STALE_MAX = 16
"""Maximum number of removed entries that a tenant may keep in addition to its waiting items."""

HeapEntry: TypeAlias = "tuple[float, int, PartT, TenantQueue[PartT]]"
"""An entry: deadline, arrival number, part, and tenant. An entry is stale once its part has been
taken or refiled.

A part with n items uses n arrival numbers: the last one, and one for each item that leaves it to
wait separately.
"""
Filed: TypeAlias = "Mapping[PartT, HeapEntry[PartT]]"
"""Each waiting part's heap entry."""

IDLE_MAX = 1024
"""Maximum number of tenants without items whose debts are remembered."""
Ring: TypeAlias = "list[tuple[int, int, TenantQueue[PartT]]]"
"""A heap of tenants, ordered by the round of their next turn and then by their order in that round.

A round in the heap may be outdated, but it is never later than the tenant's next round.
"""


class Batchable(Protocol):
    """The properties of a part that the queue needs to know. A part has at least one item."""

    @property
    def tenant(self) -> str:
        """The tenant charged for the items."""

    @property
    def weight(self) -> float:
        """The tenant's share of the work, relative to the other waiting tenants."""

    @property
    def deadline_s(self) -> float:
        """The latest start time, in Unix seconds."""

    @property
    def key(self) -> str:
        """Only items with the same key share a batch."""

    def __len__(self) -> int:
        """Returns the number of items."""

    @property
    def lengths(self) -> Sequence[int]:
        """Each item's work, in tokens or pixel-steps."""

    @property
    def length(self) -> int:
        """All items' work together."""

    def cut(self, start: int, stop: int) -> Self:
        """Removes some of the items, but not all, and returns them as another part."""


PartT = TypeVar("PartT", bound=Batchable)


class TenantQueue(Generic[PartT]):
    """One tenant's parts: earliest deadline first, both for each key and across all keys.

    Args:
        filed: all entries in the queue, used to find stale entries.
    """

    __slots__ = ("_by_deadline", "_filed", "_stale", "by_key", "name", "quantum", "spent",
                 "waiting", "work")  # fmt: skip

    def __init__(self, name: str, filed: Filed[PartT]) -> None:
        self.name = name
        self.quantum = 1.0
        """Work per round."""
        self.spent = 0.0
        """Work taken so far, in rounds of the tenant's quantum. The tenant has a deficit in later
        rounds.
        """
        self.waiting = 0
        """Number of waiting items."""
        self.work = 0
        """Total work of the waiting items."""
        self.by_key: dict[str, list[HeapEntry[PartT]]] = {}
        self._by_deadline: list[HeapEntry[PartT]] = []  # only needed while there are several keys
        self._filed = filed
        self._stale = 0

    @property
    def next_round(self) -> int:
        """The first round in which the tenant's deficit is positive."""
        return int(self.spent) + 1

    def add(self, entry: HeapEntry[PartT]) -> bool:
        """Adds a part's entry. Returns whether the part's key is new to this tenant."""
        part = entry[2]
        self.waiting += len(part)
        self.work += part.length
        is_new = part.key not in self.by_key
        if is_new:
            self._by_deadline = self._by_deadline or self._live()
            self.by_key[part.key] = []
        heappush(self.by_key[part.key], entry)
        if len(self.by_key) > 1:
            heappush(self._by_deadline, entry)
        return is_new

    def first(self, key: str) -> HeapEntry[PartT] | None:
        """Returns the entry for the tenant's first part with `key`."""
        entries = self.by_key.get(key)
        return self._top(entries) if entries else None

    def earliest(self) -> HeapEntry[PartT] | None:
        """Returns the entry for the tenant's first part with any key."""
        if len(self.by_key) == 1:
            (entries,) = self.by_key.values()
            return self._top(entries)
        if len(self._by_deadline) > 2 * self.waiting + STALE_MAX:
            self._by_deadline = self._live()
        return self._top(self._by_deadline)

    def count_removal(self, entry: HeapEntry[PartT]) -> None:
        part = entry[2]
        self.waiting -= len(part)
        self.work -= part.length
        entries = self.by_key[part.key]
        if entries[0] is entry:
            heappop(entries)
            return
        self._stale += 1
        if self._stale > self.waiting + STALE_MAX:
            self._stale = 0
            for entries in self.by_key.values():
                entries[:] = [
                    candidate for candidate in entries if self._filed.get(candidate[2]) is candidate
                ]
                heapify(entries)
            self._by_deadline = self._live() if len(self.by_key) > 1 else []

    def forget_key(self, key: str) -> None:
        del self.by_key[key]
        if len(self.by_key) < 2:
            self._by_deadline = []

    def _top(self, entries: list[HeapEntry[PartT]]) -> HeapEntry[PartT] | None:
        while entries:
            first = entries[0]
            if self._filed.get(first[2]) is first:
                return first
            heappop(entries)
        return None

    def _live(self) -> list[HeapEntry[PartT]]:
        """Returns a heap of all entries."""
        live = [
            entry
            for entries in self.by_key.values()
            for entry in entries
            if self._filed.get(entry[2]) is entry
        ]
        heapify(live)
        return live


def always(part: object) -> bool:
    return True


class BatchQueue(Generic[PartT]):
    """Parts waiting for a model process.

    A batch has at most `max_items` items with a total length of `budget`.
    """

    def __init__(self, budget: int, max_items: int) -> None:
        self.budget = budget
        self.max_items = max_items
        self._quantum = budget / HEAVIEST  # so a turn takes at most one batch
        self._round = 0
        self._turns = count()
        self._arrivals = 0
        """Number of items that have arrived."""
        self._filed: OrderedDict[PartT, HeapEntry[PartT]] = OrderedDict()
        self._tenants: dict[str, TenantQueue[PartT]] = {}
        self._idle = 0
        self._items = 0
        self._work = 0
        self._ring: Ring[PartT] = []
        self._ring_of_key: dict[str, Ring[PartT]] = {}

    def __len__(self) -> int:
        """Returns the number of waiting items."""
        return self._items

    def __iter__(self) -> Iterator[PartT]:
        """Yields all waiting parts in order of arrival."""
        return iter(self._filed)

    def __contains__(self, part: PartT) -> bool:
        return part in self._filed

    @property
    def is_full(self) -> bool:
        """True if there are enough waiting items, or enough waiting work, to fill a batch."""
        return self._items >= self.max_items or self._work >= self.budget

    @property
    def tenants(self) -> int:
        return len(self._tenants)

    def earliest(self) -> PartT | None:
        """Returns the part with the earliest deadline among tenants allowed to run ahead of turn.

        Takes O(tenants).
        """
        tenants = [
            tenant for tenant in self._tenants.values() if tenant.waiting and self._may_run(tenant)
        ]
        firsts = [entry for tenant in tenants if (entry := tenant.earliest()) is not None]
        return min(firsts)[2] if firsts else None

    def firsts(self) -> list[PartT]:
        """Returns each tenant's next part. Takes O(tenants)."""
        tenants = (tenant for tenant in self._tenants.values() if tenant.waiting)
        return [entry[2] for tenant in tenants if (entry := tenant.earliest()) is not None]

    def add(self, part: PartT) -> None:
        self._arrivals += len(part)
        self._file(part, self._arrivals)

    def update(self, part: PartT) -> None:
        """Refiles `part` if its tenant or deadline has changed."""
        entry = self._filed[part]
        if (entry[0], entry[3].name) != (part.deadline_s, part.tenant):
            self._file(part, entry[1])
            self._count_removal(entry)
            self._next_of_key(part.key)

    def remove(self, part: PartT) -> None:
        """Removes `part` without charging for it."""
        self._count_removal(self._filed.pop(part))
        self._next_of_key(part.key)

    def cut(self, part: PartT, start: int, stop: int) -> PartT:
        """Removes some of a waiting part's items, but not all, without charging for them."""
        tenant = self._filed[part][3]
        some = part.cut(start, stop)
        tenant.waiting -= len(some)
        tenant.work -= some.length
        self._items -= len(some)
        self._work -= some.length
        return some

    def separate(self, part: PartT, at: int) -> None:
        """Files one of a part's several items as a separate part, ahead of the others."""
        arrival = self._filed[part][1]
        separated = self.cut(part, at, at + 1)
        self._file(separated, arrival - len(part))

    def discard_unwanted(self, is_wanted: Callable[[PartT], bool]) -> None:
        """Removes unwanted parts and refiles the others."""
        for part in list(self._filed):
            if is_wanted(part):
                self.update(part)
            else:
                self.remove(part)

    def take(
        self,
        at_most: int,
        *,
        room: float = inf,
        spare: float = inf,
        is_wanted: Callable[[PartT], bool] = always,
        first: PartT | None = None,
    ) -> list[PartT]:
        """Removes and returns the next batch, of at most `at_most` items.

        Empty if no items are waiting.

        Args:
            at_most: maximum number of items.
            room: maximum work in addition to the first item's. The budget applies as well.
            spare: how much work may be added after the last item of a tenant whose items are all
                included.
            is_wanted: unwanted parts are removed without charging for them.
            first: the part to start with, in place of the next tenant's first part.
        """
        if first is not None and not is_wanted(first):
            self.remove(first)
            return []
        leader = first if first is not None else self._lead(is_wanted)
        if leader is None:
            return []
        tenant = self._filed[leader][3]
        batch = [self._take_items(leader, 1)]
        work = batch[0].length
        done = 0 if tenant.waiting else work
        at_most, room = min(at_most, self.max_items), min(room, self.budget) - work
        self._extend(batch, at_most, room, spare, is_wanted, done)
        return batch

    def take_in_turn(
        self,
        at_most: int,
        room: float,
        *,
        key: str | None = None,
        is_wanted: Callable[[PartT], bool] = always,
        may_take: Callable[[PartT], bool] = always,
        room_of: Callable[[PartT], float] | None = None,
    ) -> list[PartT]:
        """Removes and returns items for a running batch, in strict turn order.

        Stops at the first item that does not fit, so that no other items overtake it. Each item
        becomes a separate part.

        Args:
            at_most: maximum number of items.
            room: maximum work, or the unit measured by `room_of`.
            key: the running batch's key. None means any key, in which case all items must have the
                same key as the first item.
            is_wanted: unwanted parts are removed without charging for them.
            may_take: if it returns False for a tenant's next part, the tenant loses its turn but
                keeps the part.
            room_of: returns the room that a part's first item takes up. None means the item's work.
        """
        admitted: list[PartT] = []
        while len(admitted) < at_most:
            leader = self._lead(is_wanted)
            if leader is not None and not may_take(leader):
                leader = self._next_permitted(is_wanted, may_take)
            if leader is None:
                break
            key = leader.key if key is None else key
            takes = leader.lengths[0] if room_of is None else room_of(leader)
            if leader.key != key or takes > room:
                break
            admitted.append(self._take_items(leader, 1))
            room -= takes
        return admitted

    def fill(
        self, batch: list[PartT], room: float, is_wanted: Callable[[PartT], bool] = always
    ) -> None:
        """Adds items with the same key to another queue's `batch`, up to `room` total work."""
        self._advance()
        self._extend(batch, self.max_items, room, inf, is_wanted, 0)

    def _lead(self, is_wanted: Callable[[PartT], bool]) -> PartT | None:
        """Returns the first part of the tenant whose turn it is."""
        while (tenant := self._advance()) is not None:
            entry = tenant.earliest()
            assert entry is not None, "a tenant with items has no first part; this is a bug"
            if is_wanted(entry[2]):
                return entry[2]
            self.remove(entry[2])
        return None

    def _next_permitted(
        self, is_wanted: Callable[[PartT], bool], may_take: Callable[[PartT], bool]
    ) -> PartT | None:
        """Returns the first permitted part in turn order. Takes O(tenants log tenants).

        The round of its tenant becomes the current one. Tenants that lost their turns don't make up
        for them later.
        """
        waiting = [tenant for tenant in self._tenants.values() if tenant.waiting]
        skipped = list[TenantQueue[PartT]]()
        for tenant in sorted(waiting, key=lambda candidate: candidate.next_round):
            while (entry := tenant.earliest() if tenant.waiting else None) is not None:
                if not is_wanted(entry[2]):
                    self.remove(entry[2])
                    continue
                if not may_take(entry[2]):
                    skipped.append(tenant)
                    break
                self._round = max(self._round, tenant.next_round)
                for loser in skipped:
                    loser.spent = max(loser.spent, float(self._round))
                return entry[2]
        return None

    def waiting_of(self, name: str) -> int:
        """Returns the number of a tenant's waiting items."""
        tenant = self._tenants.get(name)
        return tenant.waiting if tenant is not None else 0

    def _extend(
        self,
        batch: list[PartT],
        at_most: int,
        room: float,
        spare: float,
        is_wanted: Callable[[PartT], bool],
        done: int,
    ) -> None:
        """Adds items with the batch's key in turn order, up to the first one that doesn't fit.

        `done` is the batch's work up to the last item of a tenant whose items are all included, or
        0.
        """
        key, total = batch[0].key, batch[0].length
        room += total
        slots = at_most - sum(len(part) for part in batch)
        while slots > 0 and (entry := self._next_of_key(key)) is not None:
            _, _, part, tenant = entry
            if not is_wanted(part):
                self.remove(part)
                continue
            beside = done + max(spare, done) if done else room
            count = self._count_fitting(part, tenant, slots, room - total, beside - total)
            if not count:
                break
            batch.append(self._take_items(part, count))
            slots -= count
            total += batch[-1].length
            if not tenant.waiting:
                done = total
        self._next_of_key(key)  # forgets the key if it has no items left

    def _count_fitting(
        self, part: PartT, tenant: TenantQueue[PartT], at_most: int, room: float, beside: float
    ) -> int:
        """Returns how many of the part's first items fit before the next tenant's turn.

        `beside` is the room while the tenant has more than a batch of work waiting.
        """
        if not self._may_run(tenant):
            return 0
        long_work = tenant.work - self.budget
        limit = min(room, beside) if long_work > 0 else room
        if len(part) == 1:
            return int(part.length <= limit)
        ring = self._ring_of_key[part.key]
        last_round = min(
            ring[0][0] if len(ring) > 1 else inf, self._round + self.budget / tenant.quantum
        )
        turn_work = (last_round - tenant.spent) * tenant.quantum
        count = work = 0
        for length in part.lengths[:at_most]:
            if work >= long_work:
                limit = room
            if work + length > limit or (count and work >= turn_work):
                break
            work += length
            count += 1
        return count

    def _file(self, part: PartT, arrival: int) -> None:
        name = part.tenant
        tenant = self._tenants.get(name)
        if tenant is None or not tenant.waiting:
            tenant = self._queue_of(name)
        tenant.quantum = self._quantum * part.weight
        entry = part.deadline_s, arrival, part, tenant
        self._filed[part] = entry
        self._items += len(part)
        self._work += part.length
        if tenant.add(entry):
            ring = self._ring_of_key.setdefault(part.key, [])
            heappush(ring, (tenant.next_round, next(self._turns), tenant))

    def _queue_of(self, name: str) -> TenantQueue[PartT]:
        """Returns a queue for tenant `name`, which has no items waiting.

        The tenant's turn comes in the next round, or once its debt is paid.
        """
        self._advance()
        tenant = self._tenants.get(name)
        if tenant is not None:
            self._idle -= 1
            tenant.spent = max(tenant.spent, float(self._round))
            return tenant
        tenant = self._tenants[name] = TenantQueue(name, self._filed)
        tenant.spent = float(self._round)
        heappush(self._ring, (tenant.next_round, next(self._turns), tenant))
        return tenant

    def _take_items(self, part: PartT, count: int) -> PartT:
        """Takes a part's first `count` items out of the queue and charges its tenant."""
        tenant = self._filed[part][3]
        if count < len(part):
            taken = self.cut(part, 0, count)
        else:
            taken = part
            self._count_removal(self._filed.pop(part))
        tenant.spent += taken.length / tenant.quantum
        return taken

    def _count_removal(self, entry: HeapEntry[PartT]) -> None:
        _, _, part, tenant = entry
        self._items -= len(part)
        self._work -= part.length
        tenant.count_removal(entry)
        if not tenant.waiting:
            self._count_idle()

    def _may_run(self, tenant: TenantQueue[PartT]) -> bool:
        """Returns whether the tenant has overdrawn its share by less than a batch."""
        return (tenant.spent - self._round) * tenant.quantum < self.budget

    def _count_idle(self) -> None:
        self._idle += 1
        if self._idle > IDLE_MAX:
            self._idle = 0
            self._tenants = {
                name: tenant for name, tenant in self._tenants.items() if tenant.waiting
            }
            self._ring = [turn for turn in self._ring if turn[2].waiting]
            heapify(self._ring)

    def _advance(self) -> TenantQueue[PartT] | None:
        """Returns the tenant whose turn it is. The tenant's next round becomes the current one.

        Forgets earlier tenants with nothing waiting.
        """
        while self._ring:
            round_, _, tenant = self._ring[0]
            if tenant.next_round > round_:
                heapreplace(self._ring, (tenant.next_round, next(self._turns), tenant))
            elif tenant.waiting:
                self._round = max(self._round, round_)
                return tenant
            else:
                heappop(self._ring)
                del self._tenants[tenant.name]
                self._idle -= 1
        return None

    def _next_of_key(self, key: str) -> HeapEntry[PartT] | None:
        """Returns the first part with `key` from the tenant whose turn it is.

        Forgets the key if there is no such part.
        """
        ring = self._ring_of_key.get(key, [])
        while ring:
            round_, _, tenant = ring[0]
            first = tenant.first(key)
            if first is None:
                heappop(ring)
                tenant.forget_key(key)
            elif len(ring) == 1 or (next_round := tenant.next_round) <= round_:
                return first
            else:
                heapreplace(ring, (next_round, next(self._turns), tenant))
        self._ring_of_key.pop(key, None)
        return None
