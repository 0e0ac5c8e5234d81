"""Evaluates a revision based on Cloud Run's request counts by status class.

Source: the metric run.googleapis.com/request_count, which lags by up to three minutes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

from infra.rollout.google import GoogleClient


@dataclass(frozen=True)
class CanaryVerdict:
    """The verdict on a revision, which is good unless too many requests failed."""

    requests: int
    failed: int
    is_good: bool

    def __str__(self) -> str:
        return f"{self.failed} of {self.requests} requests failed"


class CanaryJudge:
    """Reads the request counts of one service.

    Args:
        error_ratio: share of responses that are allowed to be 5xx.
        least_requests: with fewer requests than this, a revision is considered good, no matter how
            many of them failed.
    """

    def __init__(
        self,
        google: GoogleClient,
        project: str,
        service: str,
        *,
        error_ratio: float,
        least_requests: int,
    ) -> None:
        self._google = google
        self._project = project
        self._service = service
        self._error_ratio = error_ratio
        self._least_requests = least_requests

    def verdict(self, region: str, revision: str, since_s: float) -> CanaryVerdict:
        """Returns the verdict on `revision`'s requests since the Unix time `since_s`.

        Raises:
            Unavailable: Monitoring is unreachable, so no revision should get more traffic.
        """
        wanted = {
            "metric.type": "run.googleapis.com/request_count",
            "resource.labels.service_name": self._service,
            "resource.labels.location": region,
            "resource.labels.revision_name": revision,
        }
        reply = self._google.get(
            "monitoring",
            f"v3/projects/{self._project}/timeSeries",
            {
                "filter": " AND ".join(f'{name} = "{value}"' for name, value in wanted.items()),
                "interval.startTime": _timestamp(since_s),
                "interval.endTime": _timestamp(time.time()),
                "aggregation.alignmentPeriod": "60s",
                "aggregation.perSeriesAligner": "ALIGN_DELTA",
                "aggregation.crossSeriesReducer": "REDUCE_SUM",
                "aggregation.groupByFields": "metric.labels.response_code_class",
            },
        )
        counts: dict[str, int] = {}
        for series in (reply or {}).get("timeSeries", []):
            kind = series.get("metric", {}).get("labels", {}).get("response_code_class", "")
            counts[kind] = sum(int(point["value"]["int64Value"]) for point in series["points"])
        requests, failed = sum(counts.values()), counts.get("5xx", 0)
        is_bad = requests >= self._least_requests and failed > self._error_ratio * requests
        return CanaryVerdict(requests, failed, not is_bad)


def _timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
