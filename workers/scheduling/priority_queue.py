"""One model's waiting items in a worker: two queues, one per priority, and the suspects.

Uses no clock and does no I/O.

- Interactive items go first. Items with `batch` priority fill the room left in an interactive
    batch, with at most FILL_S of work, so they hardly lengthen it. They get a separate batch in
    three cases: no interactive item is waiting, they are owed BATCH_SHARE of the work, or a
    deadline would otherwise be missed. The last case accounts for at most one batch in URGENT_TURN.
- A `batch` priority batch has at most TURN_S of work while interactive items are waiting or have
recently arrived. A process can't be interrupted, so this limits how long an interactive item waits.
- A suspect is an item whose model process or worker died. The suspects from one death are retried
    in halves until the lethal item is isolated. Only one group runs at a time, so that the other
    processes stay up for other items. These groups alternate with other items.
- An item is given up on after DEATHS_MAX deaths, provided that it was running alone for
    DEATHS_ALONE_MAX of them. A death from another cause (a manual kill, too little memory) costs
    other items only time, even in the middle of a retry.
- With continuous batching, the same order applies to the items admitted next.
- If a model's items can't be interrupted, no single tenant may hold all of a worker's slots
    (workers/scheduling/tenant_shares.py). That tenant's items wait while others go first.
- If a device runs out of memory, the budget is halved. It grows by a tenth after each batch that
fits.

`BatchPriorityPolicy` decides how much of a model's time `batch` priority gets in addition to
interactive work. `BatchTime` estimates how long a model process takes to run a batch. Times are
Unix seconds from the same clock; durations are in seconds.

Preemption interrupts running texts and images in favor of another tenant. These normally stay in
their process until they finish, which can take minutes. A tenant that took all slots while they
were free would block the other tenants until its items finished. A text later resumes from the
tokens it already has. An image waits in its process and later continues with its next step. The
comparison uses the room tenants occupy in the process, relative to their weights. The slot's owner
keeps at least as much as the newcomer gets, so slots never go back and forth.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from math import inf
from typing import Protocol, TypeVar

from workers.scheduling.batch_queue import BatchQueue, always
from workers.scheduling.job import QueuedItem, QueuedPart
from workers.scheduling.tenant_shares import TenantShares

FADE = 0.9
"""Each batch multiplies the weights of earlier ones by this factor."""
MIN_SLOPE = 0.25
"""The marginal time per unit of work is assumed to be at least this fraction of the average.

As long as the marginal time can't be distinguished from noise, batches therefore grow only by small
factors.
"""

FILL_S = 0.005
"""The extra time that a batch may take because `batch` items are added to interactive ones.

On a GPU, this is room in a batch of short items that would otherwise go unused. On a CPU, this is
about one text.
"""
TURN_S = 0.02
"""Maximum duration of a `batch` priority batch during interactive traffic, unless it is a single
item.

An interactive item may have to wait for it.
"""
RECENT_S = 60.0
"""How long traffic is considered interactive after the last interactive item."""
BATCH_SHARE = 1 / 16
"""Share of the work that `batch` priority gets while interactive items are always waiting.

This is enough to keep `batch` work from stopping. Each turn lasts TURN_S, so an interactive item
waits for at most one additional short batch.
"""
URGENT_TURN = 4
"""While interactive items are waiting, at most one batch in this many is run to meet a batch
deadline.

Admission control relies on the remaining time (api/dispatch/admission.py, INTERACTIVE_SHARE).
"""

DEATHS_MAX = 3
"""Number of model process deaths after which an item can be given up on."""
DEATHS_ALONE_MAX = 2
"""How many of those deaths must have occurred while the item was running alone."""
BUDGET_GROWTH = 1.1
"""Growth factor for the budget after each batch that fits in memory."""
BESIDE_OVERSIZED = 1 / 4
"""Share of the budget for items admitted alongside an item that exceeds the whole budget."""
BATCH_SLOTS_SHARE = 1 / 4
"""Share of a process's slots available to `batch` priority during interactive traffic.

An admitted item stays until it is done, which can take seconds.
"""


class Placed(Protocol):
    """An item that is in a model process or waiting for a slot."""

    @property
    def tenant(self) -> str:
        """The tenant that the item belongs to."""

    @property
    def weight(self) -> float:
        """The weight of the item's tenant."""

    @property
    def can_go_on(self) -> bool:
        """True if the item can be interrupted and resumed later."""


ItemT = TypeVar("ItemT", bound=Placed)


def to_preempt(
    first: ItemT,
    inside: Iterable[ItemT],
    part_of: Callable[[ItemT], float],
    fits: Callable[[list[ItemT]], bool],
) -> list[ItemT]:
    """Returns the items to preempt for the waiting item `first`.

    Args:
        inside: the items that have slots, in order of arrival.
        part_of: returns the fraction of the process that an item uses.
        fits: returns True if `first` fits alongside these items.

    Returns:
        The most recent items of the tenants occupying the most room, because recent items are the
        cheapest to reread. Empty if `first` fits, if no tenant uses too much, or if preempting the
        excess would not make enough room.
    """
    remaining, chosen = list(inside), list[ItemT]()
    while not fits(remaining):
        item = _next(first, remaining, part_of)
        if item is None:
            return []
        remaining.remove(item)
        chosen.append(item)
    return chosen


def _next(first: ItemT, inside: list[ItemT], part_of: Callable[[ItemT], float]) -> ItemT | None:
    held: defaultdict[str, float] = defaultdict(float)
    for item in inside:
        held[item.tenant] += part_of(item) / item.weight
    wanted = held[first.tenant] + part_of(first) / first.weight
    chosen: ItemT | None = None
    for item in inside:
        is_too_much = held[item.tenant] - part_of(item) / item.weight >= wanted
        if item.tenant == first.tenant or not item.can_go_on or not is_too_much:
            continue
        if chosen is None or held[item.tenant] >= held[chosen.tenant]:
            chosen = item
    return chosen


class BatchTime:
    """A line fitted to past batches: a fixed time per batch, plus a time proportional to work.

    Fitted by least squares, with weights that decay with age.
    """

    def __init__(self) -> None:
        self._n = self._w = self._t = self._ww = self._wt = 0.0

    def observe(self, work: int, seconds: float) -> None:
        self._n = FADE * self._n + 1
        self._w = FADE * self._w + work
        self._t = FADE * self._t + seconds
        self._ww = FADE * self._ww + work * work
        self._wt = FADE * self._wt + work * seconds

    def seconds_for(self, work: float) -> float:
        """Returns how long a batch with `work` takes, or 0 if none has been observed yet."""
        return self._fixed_s + work * self._slope

    def work_in(self, seconds: float) -> float:
        """Returns how much work can be done in `seconds`, at least 0.

        Infinite if no batch has been observed yet.
        """
        return max(0.0, seconds - self._fixed_s) / self._slope if self._slope else inf

    def more_work_in(self, seconds: float) -> float:
        """Returns how much additional work lengthens a batch by `seconds`.

        Infinite if no batch has been observed yet.
        """
        return seconds / self._slope if self._slope else inf

    @property
    def _slope(self) -> float:
        if not self._w:
            return 0.0
        average = self._t / self._w
        spread = self._n * self._ww - self._w * self._w
        if spread <= 1e-9 * self._ww:  # all batches are alike
            return average
        slope = (self._n * self._wt - self._w * self._t) / spread
        return min(max(slope, MIN_SLOPE * average), average)

    @property
    def _fixed_s(self) -> float:
        return (self._t - self._slope * self._w) / self._n if self._n else 0.0


class BatchPriorityPolicy:
    """Tracks how long batches take, and the work owed to `batch` priority."""

    def __init__(self) -> None:
        self._time = BatchTime()
        self._owed = 0.0
        self._interactive_s = -inf
        self._since_urgent = 0

    @property
    def fill_work(self) -> float:
        """Work that lengthens a batch by FILL_S. Infinite until a batch has been measured."""
        return self._time.more_work_in(FILL_S)

    def observe_batch(self, work: int, seconds: float) -> None:
        """Records how long a process took to run a batch."""
        self._time.observe(work, seconds)

    def observe_interactive(self, now_s: float) -> None:
        self._interactive_s = max(self._interactive_s, now_s)

    def is_interactive(self, now_s: float) -> bool:
        return now_s - self._interactive_s < RECENT_S

    def turn_work(self, now_s: float) -> float:
        """Returns how much work beyond its first item a `batch` priority batch may have now."""
        return self._time.work_in(TURN_S) if self.is_interactive(now_s) else inf

    def is_owed(self, first: int, budget: int) -> bool:
        """Returns whether `batch` priority is owed a separate batch.

        Args:
            first: work of the first waiting item. A turn always has at least one item.
            budget: work of a full batch.
        """
        return self._owed >= max(first, min(budget, self._time.work_in(TURN_S)))

    def is_urgent(self, now_s: float, earliest_s: float, budget: int) -> bool:
        """Returns whether a deadline would pass during a full batch followed by one with its item.

        Args:
            earliest_s: the earliest deadline among waiting items with `batch` priority.
            budget: work of a full batch.
        """
        if self._since_urgent < URGENT_TURN - 1:
            return False
        return now_s < earliest_s < now_s + 2 * self._time.seconds_for(budget)

    def observe_interactive_batch(self, interactive: int, filled: int) -> None:
        """Records a batch that ran while `batch` items waited, and their share of its work."""
        self._since_urgent += 1
        self._owed += interactive * BATCH_SHARE / (1 - BATCH_SHARE) - filled

    def observe_turn(self, work: int, *, has_delayed: bool, is_urgent: bool) -> None:
        """Records a `batch` priority batch.

        Args:
            work: total work of its items.
            has_delayed: True if interactive items were waiting.
            is_urgent: True if the batch ran because of a deadline.
        """
        self._since_urgent = 0 if is_urgent else self._since_urgent + 1
        if has_delayed:
            self._owed -= work
        elif self._owed > 0:
            self._owed = max(0.0, self._owed - work)


class PriorityQueue:
    """Waiting items and running batches. `budget` and `max_items` are the same as in BatchQueue.

    `shares` limits how many slots a tenant may hold for a model that computes step by step. None
    means no limit.
    """

    def __init__(self, budget: int, max_items: int, shares: TenantShares | None = None) -> None:
        self._shares = shares
        self._held_up: set[str] = set()
        """Tenants that may take nothing until one of their items finishes or a new item arrives."""
        self._full_budget = budget
        self._interactive: BatchQueue[QueuedPart] = BatchQueue(budget, max_items)
        self._batch: BatchQueue[QueuedPart] = BatchQueue(budget, max_items)
        self._queues = (self._interactive, self._batch)
        self._policy = BatchPriorityPolicy()
        self._suspects: deque[list[QueuedItem]] = deque()
        self._running: list[list[QueuedItem]] = []
        self._suspect_turn = False

    def __len__(self) -> int:
        """Returns the number of items that may be taken now."""
        suspects = 0 if self._a_suspect_runs else sum(map(len, self._suspects))
        held_up = sum(queue.waiting_of(name) for queue in self._queues for name in self._held_up)
        return len(self._interactive) + len(self._batch) + suspects - held_up

    def __iter__(self) -> Iterator[QueuedItem]:
        waiting = (part.items for queue in self._queues for part in queue)
        return chain.from_iterable(chain(waiting, self._suspects))

    @property
    def running(self) -> list[list[QueuedItem]]:
        """The batches that were taken and have not finished."""
        return self._running

    @property
    def has_full_batch(self) -> bool:
        """True if the next batch is full, so there is nothing to gain by waiting to take it.

        Always False while there are suspects, because they run alone.
        """
        if self._suspects or self._a_suspect_runs:
            return False
        queue = self._interactive if len(self._interactive) else self._batch
        return queue.is_full

    @property
    def _a_suspect_runs(self) -> bool:
        return any(batch[0].is_suspect for batch in self._running)

    @property
    def oldest_s(self) -> float:
        """Returns when the oldest item that may be taken was queued, in Unix seconds."""
        suspects = self._suspects[0] if self._suspects and not self._a_suspect_runs else ()
        firsts = (next(iter(queue)).items[0] for queue in self._queues if len(queue))
        return min(queued.queued_at_s for queued in chain(firsts, suspects))

    def add(self, *items: QueuedItem) -> None:
        """Queues items with the same waiters and key for their priority, or with the suspects.

        If there is more than one item, they have only one waiter.
        """
        first = items[0]
        self._held_up.clear()
        if self._shares is not None:
            self._shares.record_arrival(first.tenant, first.queued_at_s)
        if first.is_suspect:
            self._suspects.extend([queued] for queued in items)
            return
        queue = self._queue_of(first)
        if queue is self._interactive:
            self._policy.observe_interactive(first.queued_at_s)
        queue.add(QueuedPart(list(items)))

    def update(self, queued: QueuedItem) -> None:
        """Moves an item whose waiters have changed to the queue for its current priority."""
        part = queued.part
        if part is None:
            return
        queue, destination = next(q for q in self._queues if part in q), self._queue_of(queued)
        at, is_alone = part.items.index(queued), len(part.items) == 1
        if queue is destination:
            if is_alone:
                queue.update(part)
            else:
                queue.separate(part, at)
        elif is_alone:
            queue.remove(part)
            destination.add(part)
        else:
            destination.add(queue.cut(part, at, at + 1))

    def take(
        self, processes: int, is_wanted: Callable[[QueuedItem], bool], now_s: float
    ) -> list[QueuedItem]:
        """Returns the next batch for one of `processes`, excluding unwanted items.

        Empty if nothing may be taken.

        A batch has at most its share of the waiting and running items. A larger batch would delay
        items that another process could run at the same time.
        """
        waiting = len(self._interactive) + len(self._batch)
        if self._suspects and not self._a_suspect_runs and (self._suspect_turn or not waiting):
            self._suspect_turn = False
            batch = [queued for queued in self._suspects.popleft() if is_wanted(queued)]
        else:
            self._suspect_turn = True
            batch = _items_of(self._choose(processes, _filter_for_parts(is_wanted), now_s))
        if batch:
            self._running.append(batch)
        return batch

    def admit(
        self,
        inside: Collection[QueuedItem],
        processes: int,
        is_wanted: Callable[[QueuedItem], bool],
        now_s: float,
    ) -> list[QueuedItem]:
        """Adds items to a batch that one of `processes` computes step by step.

        Each item counts as a separate batch from now on. Suspects run alone: while some are waiting
        and none is running, nothing is admitted until the process is empty and takes them. If no
        caller is waiting for the suspects anymore, nothing is returned, although other items may be
        waiting.

        Args:
            inside: the items that the process is computing. If empty, this is a new batch.
            is_wanted: returns True if a caller is waiting for an item.
        """
        admitted: list[QueuedItem] = []
        takes_suspects = self._suspects and not self._a_suspect_runs
        if takes_suspects and not inside:
            admitted = [queued for queued in self._suspects.popleft() if is_wanted(queued)]
        elif not takes_suspects and not any(queued.is_suspect for queued in inside):
            admitted = self._admit_by_priority(
                inside, processes, _filter_for_parts(is_wanted), now_s
            )
        self._running += [[queued] for queued in admitted]
        return admitted

    def to_preempt(
        self, inside: Collection[QueuedItem], is_wanted: Callable[[QueuedItem], bool]
    ) -> list[QueuedItem]:
        """Returns the running items to preempt for a waiting interactive item.

        Empty if nothing is waiting, or if no tenant exceeds its share.
        """
        if self._suspects or any(queued.is_suspect for queued in inside):
            return []
        queue = self._interactive

        def part_of(queued: QueuedItem) -> float:
            return max(1 / queue.max_items, _room_of(queued) / self._full_budget)

        def fits(first: QueuedItem, items: list[QueuedItem]) -> bool:
            has_room = self._room_taken(items) + _room_of(first) <= queue.budget
            return len(items) < queue.max_items and has_room

        chosen = (
            to_preempt(first, inside, part_of, partial(fits, first))
            for first in (part.items[0] for part in queue.firsts())
            if is_wanted(first)
        )
        return next((items for items in chosen if items), [])

    def _admit_by_priority(
        self,
        inside: Collection[QueuedItem],
        processes: int,
        is_wanted: Callable[[QueuedPart], bool],
        now_s: float,
    ) -> list[QueuedItem]:
        """Admits interactive items first.

        `batch` priority gets whatever `BatchPriorityPolicy` leaves for it.
        """
        queue, members = self._interactive, list(inside)
        may_take = self._slot_limit(processes * queue.max_items, now_s)
        within = sum(self._queue_of(queued) is queue for queued in members)
        at_most = min(queue.max_items - len(members), self._share(processes, queue) - within)
        members += self._take_turns(queue, members, at_most, is_wanted, may_take)
        if (admitted := members[len(inside) :]) and len(self._batch):
            self._policy.observe_interactive_batch(_work(admitted), 0)
        at_most = self._room_of_batch_priority(members, now_s)
        if batch := self._take_turns(self._batch, members, at_most, is_wanted, may_take):
            has_delayed = len(self._interactive) > 0
            self._policy.observe_turn(_work(batch), has_delayed=has_delayed, is_urgent=False)
        return admitted + batch

    def _slot_limit(self, slots: int, now_s: float) -> Callable[[QueuedPart], bool]:
        """Returns a function that lets a part's first item take one of `slots`, or declines."""
        shares = self._shares
        if shares is None:
            return always
        held = Counter(queued.tenant for batch in self._running for queued in batch)

        def may_take(part: QueuedPart) -> bool:
            tenant = part.tenant
            if not shares.may_take(tenant, held[tenant], slots, now_s):
                self._held_up.add(tenant)
                return False
            held[tenant] += 1
            return True

        return may_take

    def _take_turns(
        self,
        queue: BatchQueue[QueuedPart],
        batch: Sequence[QueuedItem],
        at_most: int,
        is_wanted: Callable[[QueuedPart], bool],
        may_take: Callable[[QueuedPart], bool],
    ) -> list[QueuedItem]:
        """Returns items from `queue` to add to the items already in the process.

        If nothing is running, one item is admitted even if it exceeds the budget. Otherwise, that
        item would wait forever.
        """
        admitted: list[QueuedItem] = []
        if not batch:
            admitted = _items_of(
                queue.take_in_turn(min(1, at_most), inf, is_wanted=is_wanted, may_take=may_take)
            )
            if not admitted:
                return []
        key, used_work = (batch or admitted)[0].key, self._room_taken([*batch, *admitted])
        at_most -= len(admitted)
        return admitted + _items_of(
            queue.take_in_turn(
                at_most,
                queue.budget - used_work,
                key=key,
                is_wanted=is_wanted,
                may_take=may_take,
                room_of=lambda part: _room_of(part.items[0]),
            )
        )

    def _room_taken(self, inside: Iterable[QueuedItem]) -> float:
        """Returns the room taken up by the items in the process.

        An item that exceeds the whole budget still leaves part of it free, so that small items
        don't wait for a large one that takes minutes.
        """
        budget = self._full_budget
        return sum(
            room if (room := _room_of(queued)) <= budget else (1 - BESIDE_OVERSIZED) * budget
            for queued in inside
        )

    def _room_of_batch_priority(self, batch: Sequence[QueuedItem], now_s: float) -> int:
        """Returns how many items with `batch` priority may be admitted.

        They leave the remaining slots to interactive items, if any have arrived recently. While
        interactive items are waiting, one `batch` item is admitted when it is owed.
        """
        queue = self._batch
        at_most = queue.max_items - len(batch)
        if self._policy.is_interactive(now_s):
            within = sum(queued.priority == "batch" for queued in batch)
            at_most = min(at_most, max(1, int(queue.max_items * BATCH_SLOTS_SHARE)) - within)
        if len(self._interactive):
            first = queue.earliest()
            owed = first is not None and self._policy.is_owed(first.lengths[0], queue.budget)
            at_most = min(at_most, int(owed))
        return at_most

    def _choose(
        self, processes: int, is_wanted: Callable[[QueuedPart], bool], now_s: float
    ) -> list[QueuedPart]:
        """Returns a batch with items of one or both priorities, as parts."""
        if not len(self._batch):
            return self._take_interactive(processes, is_wanted)
        urgent, budget = None, self._batch.budget
        if len(self._interactive):
            first = self._batch.earliest()
            if first is not None and self._policy.is_urgent(now_s, first.deadline_s, budget):
                urgent = first
            elif not self._policy.is_owed(budget if first is None else first.lengths[0], budget):
                batch = self._take_interactive(processes, is_wanted)
                self._fill(batch, is_wanted)
                return batch
        batch = self._batch.take(
            self._share(processes, self._batch),
            room=self._policy.turn_work(now_s),
            spare=self._policy.fill_work,
            is_wanted=is_wanted,
            first=urgent,
        )
        has_delayed = len(self._interactive) > 0
        self._policy.observe_turn(
            _work(batch), has_delayed=has_delayed, is_urgent=urgent is not None
        )
        return batch

    def _take_interactive(
        self, processes: int, is_wanted: Callable[[QueuedPart], bool]
    ) -> list[QueuedPart]:
        at_most = self._share(processes, self._interactive)
        spare = self._policy.fill_work
        return self._interactive.take(at_most, spare=spare, is_wanted=is_wanted)

    def _fill(self, batch: list[QueuedPart], is_wanted: Callable[[QueuedPart], bool]) -> None:
        """Adds `batch` priority items to an interactive batch if doing so costs next to nothing."""
        if not batch:
            return
        interactive = _work(batch)
        room = min(self._interactive.budget - interactive, self._policy.fill_work)
        self._batch.fill(batch, room, is_wanted)
        self._policy.observe_interactive_batch(interactive, _work(batch) - interactive)

    def _share(self, processes: int, queue: BatchQueue[QueuedPart]) -> int:
        """Returns how many waiting and running items in `queue` one process may take."""
        running = sum(len(batch) for batch in self._running if self._queue_of(batch[0]) is queue)
        return -(-(len(queue) + running) // processes)

    def _queue_of(self, queued: QueuedItem) -> BatchQueue[QueuedPart]:
        return self._batch if queued.priority == "batch" else self._interactive

    def batch_ended(self, batch: list[QueuedItem]) -> None:
        """Removes a batch, or items admitted to a batch, from the running batches."""
        ended = set(batch)
        self._held_up.clear()
        self._running = [other for other in self._running if other[0] not in ended]

    def batch_died(self, batch: list[QueuedItem], *, was_shared: bool = False) -> list[QueuedItem]:
        """Requeues `batch` after its model process died. Returns the items to give up on.

        `was_shared`: True if the process had another batch, so no item was running alone.
        """
        self.batch_ended(batch)
        for queued in batch:
            queued.deaths += 1
            queued.deaths_alone += len(batch) == 1 and not was_shared
        if batch[0].deaths_alone >= DEATHS_ALONE_MAX and batch[0].deaths >= DEATHS_MAX:
            return batch
        middle = len(batch) // 2
        self._suspects.extend(half for half in (batch[:middle], batch[middle:]) if half)
        return []

    def discard_unwanted(self, is_wanted: Callable[[QueuedItem], bool]) -> None:
        for queue in self._queues:
            queue.discard_unwanted(_filter_for_parts(is_wanted))
        for first in [part.items[0] for part in self._interactive]:
            if first.priority == "batch":  # the interactive waiters are gone
                self.update(first)
        groups = ([queued for queued in group if is_wanted(queued)] for group in self._suspects)
        self._suspects = deque(group for group in groups if group)

    def observe_item(
        self, queued: QueuedItem, seconds: float, now_s: float, *, is_computed: bool = True
    ) -> None:
        """Records how long an item held its slot, and whether it ran to completion."""
        if self._shares is not None:
            self._shares.record_end(queued.tenant, seconds, now_s, is_computed=is_computed)

    def observe_batch(self, batch: list[QueuedItem], seconds: float) -> None:
        """Records how long a process took to compute all items in `batch`."""
        self._policy.observe_batch(_work(batch), seconds)

    def adjust_budget(self, *, was_short: bool) -> None:
        """Halves the budget if the last batch ran out of memory; otherwise, lets it grow."""
        for queue in self._queues:
            target = queue.budget // 2 if was_short else int(queue.budget * BUDGET_GROWTH) + 1
            queue.budget = max(1, min(self._full_budget, target))


def _room_of(queued: QueuedItem) -> int:
    return queued.prepared.room or queued.prepared.length


def _work(batch: Iterable[QueuedItem | QueuedPart]) -> int:
    return sum(entry.length for entry in batch)


def _items_of(parts: Iterable[QueuedPart]) -> list[QueuedItem]:
    return [queued for part in parts for queued in part.release()]


def _filter_for_parts(is_wanted: Callable[[QueuedItem], bool]) -> Callable[[QueuedPart], bool]:
    """Returns a function that tests all of a part's items."""

    def are_wanted(part: QueuedPart) -> bool:
        if is_wanted(part.items[0]):  # the others have the same waiter
            return True
        for queued in part.release()[1:]:
            is_wanted(queued)
        return False

    return are_wanted
