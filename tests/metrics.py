"""Reads the metrics of this process."""

from prometheus_client import REGISTRY


def metric(name: str, **labels: str) -> float:
    """The value of a sample; 0 if it was never set."""
    return REGISTRY.get_sample_value(name, labels) or 0.0
