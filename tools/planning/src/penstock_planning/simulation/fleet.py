"""One class's GPU nodes in a region, managed the way the cluster autoscaler manages them."""

from __future__ import annotations

import random
from collections import deque

import simpy

from penstock_planning.simulation.scenario import Cluster, GpuFailure
from penstock_planning.simulation.worker import Node, SimulatedWorker, Steps
from shared.models.entry import Gpu

CORDONED_MAX_SHARE = 0.1
"""Equals MAX_SHARE of workers/gpu_nodes.py."""


class Fleet:
    """Nodes for one class, each with as many GPUs as one worker uses, or one that workers share.

    Pods get free places immediately. Nodes are ordered for pending pods and for the buffer. A node
    without workers is deleted after a while.

    Args:
        gpu: the class's GPU. `none` stands for general nodes.
        most_nodes: quota or stock. None means no limit.
    """

    def __init__(
        self,
        env: simpy.Environment,
        cluster: Cluster,
        gpu: Gpu,
        most_nodes: int | None,
        chance: random.Random,
    ) -> None:
        self._env = env
        self._cluster = cluster
        self.gpu = gpu
        self.places = gpu.share
        self._most_nodes = most_nodes
        self._chance = chance
        self._made = 0
        self.nodes: list[Node] = []
        """Nodes that have been ordered, are running, or have received a termination notice. All of
        them are paid for from the time they are ordered.
        """
        self._pending: deque[SimulatedWorker] = deque()
        self.is_out_of_stock = False
        self.is_lost = False
        self.emptied_s: list[float] = []
        """Times at which nodes with a failed GPU were cordoned."""
        self._retired_busy_s = self._retired_s = 0.0
        """Total seconds that deleted nodes were busy, and total seconds that they existed."""
        env.process(self._scale())

    # Pods

    def request(self, worker: SimulatedWorker) -> None:
        self._pending.append(worker)
        self._place()

    def give_up(self, worker: SimulatedWorker) -> None:
        """Removes a pod: frees its place, or stops waiting for one."""
        node = worker.node
        if node is None:
            self._pending.remove(worker)
            return
        node.workers.remove(worker)
        if not node.workers:
            node.since_s = self._env.now
        self._place()

    def _place(self) -> None:
        while self._pending:
            free = [node for node in self.nodes if node.is_ready and node.free > 0]
            if not free:
                return
            worker = self._pending.popleft()
            node = min(free, key=lambda candidate: _order(candidate, worker))
            node.workers.append(worker)
            worker.node = node
            worker.placed.succeed()

    # Nodes

    def start_with(self, nodes: int) -> None:
        """Adds nodes that exist from the start."""
        for _ in range(nodes):
            node = self._order_node()
            node.is_ready = True
        self._place()

    def _scale(self) -> Steps:
        while True:
            if not self.is_lost:
                self._order_nodes()
                self._delete_nodes()
            yield self._env.timeout(self._cluster.tick_s)

    def _order_nodes(self) -> None:
        places = sum(node.free for node in self.nodes if not node.is_cordoned)
        missing = len(self._pending) + self.buffer - places
        wanted = max(0, -(-missing // self.places))
        if self._most_nodes is not None:
            wanted = min(wanted, self._most_nodes - len(self.nodes))
        if self.is_out_of_stock:
            return
        for _ in range(wanted):
            self._env.process(self._start(self._order_node()))

    def _order_node(self) -> Node:
        self._made += 1
        node = Node(f"node-{self._made}", self.places, self._cluster.spot)
        node.since_s = node.ordered_s = self._env.now
        self.nodes.append(node)
        rate_per_s = self._cluster.spot_losses_per_node_day / 86400
        if node.is_spot and rate_per_s:
            self._env.process(self._lose_later(node, self._chance.expovariate(rate_per_s)))
        return node

    def _start(self, node: Node) -> Steps:
        yield self._env.timeout(self._cluster.node_start_s)
        if node in self.nodes:
            node.is_ready = True
            node.since_s = self._env.now
            self._place()

    def _delete_nodes(self) -> None:
        spare = sum(node.free for node in self.nodes if node.is_ready) - self.buffer
        for node in list(self.nodes):
            is_idle_s = self._env.now - node.since_s
            if (
                node.is_ready
                and not node.workers
                and is_idle_s >= self._cluster.node_idle_s
                and spare >= node.places
            ):
                spare -= node.places
                self._remove(node)

    def _remove(self, node: Node) -> None:
        self.nodes.remove(node)
        self._retired_busy_s += node.busy_s
        self._retired_s += self._env.now - node.ordered_s
        node.is_ready = False

    # Losses

    def lose(self, share: float) -> None:
        """Terminates a share of the spot nodes, with notice."""
        spot = [node for node in self.nodes if node.is_spot and node.is_ready]
        for node in self._chance.sample(spot, round(len(spot) * share)):
            self._env.process(self._lose(node))

    def fail_gpus(self, failure: GpuFailure) -> None:
        """Handles a failure of some nodes' GPUs."""
        nodes = [node for node in self.nodes if node.is_ready and not node.has_failed]
        for node in self._chance.sample(nodes, min(len(nodes), failure.count)):
            node.has_failed = True
            self._env.process(self._empty(node, failure))

    def _empty(self, node: Node, failure: GpuFailure) -> Steps:
        """Drains a node whose GPU has failed; the node is deleted afterward."""
        for worker in list(node.workers):
            worker.lose_gpu(failure.worker_leaves_s)
        yield self._env.timeout(failure.node_emptied_s)
        while self._count_cordoned() >= max(1, int(len(self.nodes) * CORDONED_MAX_SHARE)):
            yield self._env.timeout(self._cluster.tick_s)
        if node not in self.nodes:
            return
        node.is_ready, node.is_cordoned = False, True
        self.emptied_s.append(self._env.now)
        for worker in list(node.workers):
            worker.evict("GPU failed")
        while node in self.nodes:
            if not node.workers and self._env.now - node.since_s >= self._cluster.node_idle_s:
                self._remove(node)
            else:
                yield self._env.timeout(self._cluster.tick_s)

    def _count_cordoned(self) -> int:
        return sum(node.is_cordoned for node in self.nodes)

    def lose_all(self) -> None:
        """Removes all nodes at once, with their workers."""
        self.is_lost = True
        for node in list(self.nodes):
            for worker in list(node.workers):
                worker.evict("region lost")
            self._remove(node)

    def _lose_later(self, node: Node, after_s: float) -> Steps:
        yield self._env.timeout(after_s)
        if node in self.nodes and node.is_ready:
            yield self._env.process(self._lose(node))

    def _lose(self, node: Node) -> Steps:
        node.is_ready = False  # accepts no new pods
        for worker in list(node.workers):
            worker.evict("spot")
        yield self._env.timeout(self._cluster.spot_notice_s)
        if node in self.nodes:
            self._remove(node)

    @property
    def buffer(self) -> int:
        return self._cluster.buffer

    @property
    def gpu_busy_s(self) -> float:
        """Total GPU-busy seconds across all nodes so far."""
        now_s = self._env.now
        return self._retired_busy_s + sum(
            node.busy_s + (now_s - node.since_s if node.busy else 0.0) for node in self.nodes
        )

    @property
    def node_s(self) -> float:
        """Paid seconds for all nodes so far, from order to deletion."""
        now_s = self._env.now
        return self._retired_s + sum(now_s - node.ordered_s for node in self.nodes)


def _order(node: Node, worker: SimulatedWorker) -> tuple[int, int]:
    """Returns the sort key for placing a pod, with anti-affinity between a model's workers."""
    alike = sum(other.model == worker.model for other in node.workers)
    return (alike if worker.is_spread else 0, -len(node.workers))
