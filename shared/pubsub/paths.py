"""The full names of topics and subscriptions on Pub/Sub."""

from __future__ import annotations


def topic_path(project: str, topic_id: str) -> str:
    """`projects/<project>/topics/<topic_id>`."""
    return f"projects/{project}/topics/{topic_id}"


def subscription_path(project: str, subscription_id: str) -> str:
    """`projects/<project>/subscriptions/<subscription_id>`."""
    return f"projects/{project}/subscriptions/{subscription_id}"
