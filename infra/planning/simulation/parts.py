"""The parts of a running simulation, by model and region."""

from __future__ import annotations

from dataclasses import dataclass, field

from infra.planning.simulation.api_site import ApiSite
from infra.planning.simulation.fleet import Fleet
from infra.planning.simulation.keda import Autoscaler
from infra.planning.simulation.replicas import SimulatedDeployment
from infra.planning.simulation.service import Service

Place = tuple[str, str]
"""Model and region."""


@dataclass
class Parts:
    """The parts of the simulated world. Events change them."""

    services: dict[str, Service]
    """Services by model. Workers of all regions pull from one subscription."""
    sites: dict[Place, ApiSite] = field(default_factory=dict)
    fleets: dict[tuple[str, str], Fleet] = field(default_factory=dict)
    """Fleets by GPU class and region."""
    replicas: dict[Place, SimulatedDeployment] = field(default_factory=dict)
    autoscalers: dict[Place, Autoscaler] = field(default_factory=dict)
