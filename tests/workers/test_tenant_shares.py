"""If items can't be interrupted, a tenant never has all of a worker's slots while others use the
worker.
"""

from __future__ import annotations

import pytest

from tests.workers.test_priority_queue import NOW_S, text
from workers.scheduling.job import QueuedItem
from workers.scheduling.priority_queue import PriorityQueue
from workers.scheduling.tenant_shares import OTHERS_S, REMEMBERED_S, SHORT_S, TenantShares

LONG_S = 60.0


class Worker:
    """A worker whose processes each compute one item at a time, for as long as the test decides."""

    def __init__(self, processes: int = 2) -> None:
        self.queue = PriorityQueue(1, max_items=1, shares=TenantShares())
        self.processes = processes
        self.now_s = NOW_S

    def add(self, *tenants: str, priority: str = "interactive") -> None:
        for tenant in tenants:
            self.queue.add(text(1, priority, self.now_s, tenant=tenant))  # type: ignore[arg-type]

    def start(self) -> list[QueuedItem]:
        return self.queue.admit((), self.processes, lambda queued: True, self.now_s)

    def started(self) -> str:
        """The tenants whose items are started on free processes. Empty if nothing starts."""
        return "".join(queued.tenant for queued in self.start())

    def end(self, tenant: str, took_s: float) -> None:
        """Finishes a tenant's first running item."""
        ((queued, *_),) = [one for one in self.queue.running if one[0].tenant == tenant][:1]
        self.now_s += took_s
        self.queue.batch_ended([queued])
        self.queue.observe_item(queued, took_s, self.now_s)

    def has_run(self, tenant: str, took_s: float) -> None:
        """Runs one of a tenant's items, with nothing else running."""
        self.add(tenant)
        assert self.started() == tenant
        self.end(tenant, took_s)


def test_the_last_slot_is_free_for_others() -> None:
    worker = Worker()
    worker.has_run("quiet", 1.0)
    worker.add("busy", "busy", "busy")
    assert [worker.started(), worker.started()] == ["busy", ""]
    assert len(worker.queue) == 0  # ensures that the process waits for a new item
    worker.add("quiet")
    assert len(worker.queue) == 3
    assert worker.started() == "quiet"
    worker.end("quiet", 1.0)
    assert worker.started() == ""
    worker.end("busy", LONG_S)
    assert worker.started() == "busy"


def test_items_of_batch_priority_take_no_more() -> None:
    worker = Worker()
    worker.has_run("quiet", 1.0)
    worker.add("busy")
    worker.add("busy", "busy", priority="batch")
    assert [worker.started(), worker.started()] == ["busy", ""]
    worker.add("quiet", priority="batch")
    assert worker.started() == "quiet"


def test_a_tenant_that_is_alone_has_all_slots() -> None:
    worker = Worker()
    worker.add("busy", "busy")
    assert [worker.started(), worker.started()] == ["busy", "busy"]
    later = Worker()
    later.has_run("quiet", 1.0)
    later.now_s += OTHERS_S + 1
    later.add("busy", "busy")
    assert [later.started(), later.started()] == ["busy", "busy"]


@pytest.mark.parametrize(("took_s", "second"), [(SHORT_S, "busy"), (SHORT_S + 1, "")])
def test_a_tenant_with_short_items_has_all_slots(took_s: float, second: str) -> None:
    worker = Worker()
    worker.has_run("busy", took_s)
    worker.has_run("busy", SHORT_S / 2)
    worker.has_run("quiet", 1.0)
    worker.add("busy", "busy")
    assert [worker.started(), worker.started()] == ["busy", second]


def test_items_that_are_canceled_soon_make_no_tenant_quick() -> None:
    worker = Worker()
    worker.add("busy")
    assert worker.started() == "busy"
    [[canceled]] = worker.queue.running
    worker.queue.batch_ended([canceled])
    worker.queue.observe_item(canceled, SHORT_S / 2, worker.now_s, is_computed=False)
    worker.has_run("quiet", 1.0)
    worker.add("busy", "busy")
    assert [worker.started(), worker.started()] == ["busy", ""]


def test_a_long_item_is_remembered_for_an_hour() -> None:
    worker = Worker()
    worker.has_run("busy", LONG_S)
    worker.now_s += REMEMBERED_S
    worker.has_run("busy", 1.0)
    worker.has_run("quiet", 1.0)
    worker.add("busy", "busy")
    assert [worker.started(), worker.started()] == ["busy", "busy"]


def test_one_process_is_for_everybody_in_turn() -> None:
    worker = Worker(processes=1)
    worker.has_run("quiet", 1.0)
    worker.add("busy", "busy", "quiet")
    order = []
    for _ in range(3):
        order.append(worker.started())
        worker.end(order[-1], LONG_S)
    assert order == ["busy", "quiet", "busy"]


def test_unwanted_items_of_others_are_passed_by() -> None:
    worker = Worker()
    worker.has_run("quiet", 1.0)
    worker.add("busy", "busy", "gone", "quiet")
    assert worker.started() == "busy"
    taken = worker.queue.admit((), 2, lambda queued: queued.tenant != "gone", worker.now_s)
    assert [queued.tenant for queued in taken] == ["quiet"]
    assert len([queued for queued in worker.queue if queued.tenant == "gone"]) == 0
