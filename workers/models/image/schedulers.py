"""Creates a scheduler for each image, with the settings from the model's folder."""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any

import diffusers

from shared.models.schedulers import OWN_SCHEDULER, SCHEDULERS


class Schedulers:
    """A model's schedulers, by their names in requests.

    Args:
        own: the scheduler in the model's folder.
    """

    def __init__(self, own: Any) -> None:
        self._own = own
        self._unused: dict[str, Any] = {}

    def create(self, name: str) -> Any:
        """Returns a new scheduler. Its state must not carry over between items."""
        config = self._own.config
        if name == OWN_SCHEDULER or isinstance(
            self._own, diffusers.FlowMatchEulerDiscreteScheduler
        ):
            return _with_times_on_host(type(self._own).from_config(config))
        # Some schedulers iterate over every training timestep when created, which takes half a
        # second for dpm2.
        if name not in self._unused:
            choice = SCHEDULERS[name]
            kind = getattr(diffusers, choice.class_name)
            self._unused[name] = kind.from_config(config, **choice.options)
        return _with_times_on_host(copy.deepcopy(self._unused[name]))


def _with_times_on_host(scheduler: Any) -> Any:
    """Returns a scheduler that keeps its timesteps on the host.

    If they were on a device, each comparison would have to wait for the device.
    """
    set_timesteps = scheduler.set_timesteps

    @wraps(set_timesteps)
    def set_on_host(*args: Any, **kwargs: Any) -> None:
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        set_timesteps(*args, **kwargs)

    scheduler.set_timesteps = set_on_host
    return scheduler
