"""Workers shared by several models: each pod is a worker for each model, in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import simpy

from penstock_planning.simulation.service import Service
from penstock_planning.simulation.worker import SimulatedWorker
from shared.errors import ConfigurationError


class SharedService:
    """Workers shared by several models: each pod acts as a worker for each model in turn.

    Each part pulls from its model's subscription. The parts compute one at a time, in whole
    batches.

    Raises:
        ConfigurationError: a model has `steps`, which is not supported here.
    """

    def __init__(self, env: simpy.Environment, name: str, services: Sequence[Service]) -> None:
        for service in services:
            if service.load.steps is not None:
                field = f"models.{service.model.name}.steps"
                raise ConfigurationError(
                    f"{field}: models that share workers can only be simulated in whole batches",
                    field=field,
                )
        self._env = env
        self.name = name
        self._services = services

    def add_worker(self, pod: SimulatedWorker) -> None:
        """Adds a warm pod, which pulls all models' jobs."""
        parts = [self._part(pod, service) for service in self._services]
        pod.parts = tuple(parts)
        pod.is_ready, pod.ready_s = True, self._env.now
        for part in parts:
            part.others = tuple(other for other in parts if other is not part)
        for part, service in zip(parts, self._services, strict=True):
            service.add_worker(part)

    def _part(self, pod: SimulatedWorker, service: Service) -> SimulatedWorker:
        part = SimulatedWorker(
            pod.name,
            pod.region,
            service.model.name,
            processes=pod.processes,
            placed=pod.placed,
            is_spread=pod.is_spread,
            on_evict=_never,
            on_lost_gpu=_never,
        )
        part.node = pod.node
        return part

    def drain(self, pod: SimulatedWorker) -> simpy.Event:
        """Stops a pod from pulling.

        The event fires when the pod has finished its jobs.
        """
        pod.is_draining = True
        return self._env.all_of([service.drain(part) for service, part in self._of(pod)])

    def leave(self, pod: SimulatedWorker) -> None:
        """Removes a pod. Any jobs that the pod still holds go back to the broker."""
        pod.settle(self._env.now)
        pod.is_draining = pod.is_gone = True
        for service, part in self._of(pod):
            service.leave(part)

    def lose(self, pod: SimulatedWorker) -> None:
        """Handles a dead pod. The broker redelivers the pod's jobs when their leases expire."""
        pod.settle(self._env.now)
        pod.is_draining = pod.is_gone = True
        for service, part in self._of(pod):
            service.lose(part)

    def lose_gpu(self, pod: SimulatedWorker) -> None:
        for service, part in self._of(pod):
            service.lose_gpu(part)

    def _of(self, pod: SimulatedWorker) -> Iterator[tuple[Service, SimulatedWorker]]:
        # A pod has no parts until it is warm.
        return zip(self._services, pod.parts, strict=False)


def _never(worker: SimulatedWorker, about: object) -> None:
    raise AssertionError("only pods are on nodes; this is a bug")
