"""Workers that several models share: each pod is a worker of each model, in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import simpy

from penstock_planning.simulation.service import Service
from penstock_planning.simulation.worker import SimulatedWorker
from shared.errors import ConfigurationError


class SharedService:
    """The workers' side of models that share workers: a pod is a worker of each, in turn.

    Each part pulls from the subscription of its model. One computes at a time, whole batches.

    Raises:
        ConfigurationError: a model has `steps`, which is not simulated here.
    """

    def __init__(self, env: simpy.Environment, name: str, services: Sequence[Service]) -> None:
        for service in services:
            if service.load.steps is not None:
                field = f"models.{service.model.name}.steps"
                raise ConfigurationError(
                    f"{field}: models that share workers are simulated in whole batches only",
                    field=field,
                )
        self._env = env
        self.name = name
        self._services = services

    def add_worker(self, pod: SimulatedWorker) -> None:
        """A pod is warm: it pulls the jobs of all models."""
        parts = [self._part(pod, service) for service in self._services]
        pod.parts = tuple(parts)
        pod.is_ready, pod.ready_s = True, self._env.now
        for part in parts:
            part.others = tuple(one for one in parts if one is not part)
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
        """A pod stops pulling. The event comes when it has done what it holds."""
        pod.is_draining = True
        return self._env.all_of([service.drain(part) for service, part in self._of(pod)])

    def leave(self, pod: SimulatedWorker) -> None:
        """A pod is gone. The broker gets what it still held."""
        pod.settle(self._env.now)
        pod.is_draining = pod.is_gone = True
        for service, part in self._of(pod):
            service.leave(part)

    def lose(self, pod: SimulatedWorker) -> None:
        """A pod died. The broker gives what it held to others when the leases end."""
        pod.settle(self._env.now)
        pod.is_draining = pod.is_gone = True
        for service, part in self._of(pod):
            service.lose(part)

    def lose_gpu(self, pod: SimulatedWorker) -> None:
        for service, part in self._of(pod):
            service.lose_gpu(part)

    def _of(self, pod: SimulatedWorker) -> Iterator[tuple[Service, SimulatedWorker]]:
        # Before it is warm, a pod has none.
        return zip(self._services, pod.parts, strict=False)


def _never(worker: SimulatedWorker, about: object) -> None:
    raise AssertionError("only pods are on nodes; this is a bug")
