"""Reads this process's metrics."""

from prometheus_client import REGISTRY


def metric(name: str, **labels: str) -> float:
    """A sample's value, or 0 if it was never set."""
    return REGISTRY.get_sample_value(name, labels) or 0.0
