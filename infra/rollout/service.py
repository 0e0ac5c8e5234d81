"""A Cloud Run service as a rollout sees it: its revisions and traffic split.

Source: Cloud Run Admin API v2, projects.locations.services
    (https://docs.cloud.google.com/run/docs/reference/rest/v2).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infra.rollout.google import GoogleClient

LATEST, NAMED = "TRAFFIC_TARGET_ALLOCATION_TYPE_LATEST", "TRAFFIC_TARGET_ALLOCATION_TYPE_REVISION"
CHANGE_LIMIT_S = 300.0
"""Time limit for a traffic change, which takes a few seconds."""
CANDIDATE_TAG = "candidate"


@dataclass(frozen=True)
class Traffic:
    """The revisions that serve traffic.

    Attributes:
        shares: percentage of requests, keyed by revision name.
        follows_latest: True if the newest revision automatically receives traffic as soon as it
            exists.
        candidate_url: URL of the revision with the `candidate` tag. Empty if there is none.
    """

    shares: dict[str, int]
    follows_latest: bool
    newest: str
    candidate_url: str


class CloudRunService:
    """A service in one region."""

    def __init__(
        self, google: GoogleClient, name: str, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self.name = name
        self._google = google
        self._pause = pause

    def traffic(self) -> Traffic | None:
        """Returns the current traffic, or None if the service does not exist yet.

        Raises:
            Unavailable: Cloud Run is unreachable or rejected the request.
        """
        service = self._google.get("run", f"v2/{self.name}", missing_ok=True)
        if service is None:
            return None
        newest = str(service.get("latestReadyRevision", "")).rpartition("/")[2]
        # With no targets, Cloud Run sends all traffic to the newest revision.
        targets = service.get("traffic") or [{"type": LATEST, "percent": 100}]
        shares: dict[str, int] = {}
        for target in targets:
            revision = newest if target.get("type") == LATEST else target.get("revision", "")
            if target.get("percent"):
                shares[revision] = shares.get(revision, 0) + int(target["percent"])
        urls = [
            status.get("uri", "")
            for status in service.get("trafficStatuses", [])
            if status.get("tag") == CANDIDATE_TAG
        ]
        return Traffic(
            shares,
            any(target.get("type") == LATEST for target in targets),
            newest,
            "".join(urls[:1]),
        )

    def give(self, shares: dict[str, int], candidate: str = "") -> None:
        """Splits the traffic by revision and assigns `candidate` a separate URL.

        Returns when done.

        Raises:
            Unavailable: Cloud Run rejected the change or did not apply it in time.
        """
        if sum(shares.values()) != 100:
            raise ValueError(f"shares {shares} do not add up to 100: this is a bug")
        targets: list[dict[str, Any]] = [
            {"type": NAMED, "revision": revision, "percent": percent}
            for revision, percent in shares.items()
            if percent
        ]
        if candidate:
            targets.append({"type": NAMED, "revision": candidate, "tag": CANDIDATE_TAG})
        operation = self._google.patch(
            "run", f"v2/{self.name}?updateMask=traffic", {"traffic": targets}
        )
        self._google.await_done("run", operation, CHANGE_LIMIT_S, self._pause)
