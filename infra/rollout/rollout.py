"""The rollout, by region: tests the candidate, increases its traffic, and rolls back on failure.

Between rollouts, traffic is pinned to a revision by name, so `terraform apply` creates a revision
that serves no traffic, no matter what is done manually in between. Terraform ignores `traffic`
(infra/terraform/modules/region/api.tf). The test sends a real request, as a caller would, to each
model that always has a worker.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infra.rollout.examples import EXAMPLES, ExampleRequest
from infra.rollout.judge import CanaryJudge
from infra.rollout.service import CloudRunService, Traffic
from shared.errors import ConfigurationError, PenstockError, Unavailable
from shared.models.catalog import Catalog, Model

Check = Callable[[str], list[str]]
"""Sends real requests to a URL. Returns a line for each request, or raises Unavailable."""

_READY_LIMIT_S = 10.0
_NETWORK_S = 10.0
"""Added to a model's deadline, so that the API's own error arrives before the time limit."""


def smoke(url: str, key: str, catalog: Catalog) -> list[str]:
    """Sends a request for each model in `catalog` with replicas.min >= 1.

    Returns a line for each model.

    Models that scale to zero are skipped, because their first response has to wait for a GPU no
    matter how the API performs.

    Raises:
        Unavailable: a response was wrong or did not arrive within the model's deadline.
    """
    # Avoids /healthz because Google's front end intercepts that path on Cloud Run and returns a
    # 404.
    _fetch(urllib.request.Request(f"{url}/readyz"), _READY_LIMIT_S)
    warm_models = [model for model in catalog.models if model.replicas.min >= 1]
    return [f"{url} answers"] + [_ask(url, key, model) for model in warm_models]


def _ask(url: str, key: str, model: Model) -> str:
    # The text is unique, so the response must come from a worker, not from a cache.
    text = f"smoke test {uuid.uuid4()}"
    try:
        return _ask_with(text, url, key, model)
    except (KeyError, IndexError, TypeError) as error:
        raise Unavailable(
            f"{url}: {model.name} returned a response of an unexpected shape: {error!r}"
        ) from error


def _ask_with(text: str, url: str, key: str, model: Model) -> str:
    example = EXAMPLES[model.task]
    request = _request(url, key, example.request(model, text))
    answer = _fetch(request, model.deadline.default_s + _NETWORK_S)
    try:
        return f"{model.name}: {example.describe_answer(model, answer)}"
    except ValueError as error:
        raise Unavailable(f"{url}: {model.name} returned {error}") from error


def _request(url: str, key: str, example: ExampleRequest) -> urllib.request.Request:
    headers = {"content-type": "application/json", **example.headers}
    if key:
        headers["authorization"] = f"Bearer {key}"
    return urllib.request.Request(
        f"{url}{example.path}", json.dumps(example.body).encode(), headers
    )


def _fetch(request: urllib.request.Request, limit_s: float) -> Any:
    """Sends a request and parses the JSON response.

    Raises:
        Unavailable: the response did not arrive in time, was cut off, is an error, or is not JSON.
    """
    url = request.full_url
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise Unavailable(f"{url}: {error.code} {_start_of_body(error)}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(f"{url}: {error}") from error


def _start_of_body(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            return error.read(500).decode(errors="replace")
        except (OSError, http.client.HTTPException):
            return "(the body was cut off)"


class Rollout:
    """Rolls out the newest revision in every region.

    Args:
        services: keyed by region, in rollout order.
        public_urls: each region's public URL, checked after each step.
        steps_percent: the candidate's traffic shares, increasing to 100.
        watch_s: how long each share is watched, in seconds. The request counts lag by three
            minutes.
    """

    def __init__(
        self,
        services: Mapping[str, CloudRunService],
        judge: CanaryJudge,
        check: Check,
        public_urls: Mapping[str, str],
        *,
        steps_percent: Sequence[int] = (5, 25, 50, 100),
        watch_s: float = 360.0,
        pause: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = print,
    ) -> None:
        rising = sorted(set(steps_percent))
        if rising != list(steps_percent) or rising[-1:] != [100]:
            raise ConfigurationError(
                f"steps must increase to 100, such as 5,25,50,100; got {list(steps_percent)}",
                field="steps",
            )
        self._services = services
        self._judge = judge
        self._check = check
        self._public_urls = public_urls
        self._steps = steps_percent
        self._watch_s = watch_s
        self._pause = pause
        self._say = say

    def hold(self) -> None:
        """Pins traffic to the serving revisions by name, so that the next revision gets none.

        Callers are not affected.
        """
        for region, service in self._services.items():
            traffic = service.traffic()
            if traffic is not None and traffic.follows_latest:
                service.give(traffic.shares)
                self._say(f"{region}: held at {_shares(traffic.shares)}")

    def require_held(self) -> None:
        """Checks that traffic is pinned. Changes nothing.

        Raises:
            ConfigurationError: running apply now would immediately expose the new revision to
                callers.
        """
        for region, service in self._services.items():
            traffic = service.traffic()
            if traffic is not None and traffic.follows_latest:
                raise ConfigurationError(
                    f"{region}: traffic follows the newest revision; run python -m infra.rollout "
                    "hold first"
                )

    def try_candidate(self) -> None:
        """Assigns each region's newest revision a URL but no traffic, and sends requests there.

        Raises:
            Unavailable: a response was missing or wrong.
        """
        for region, service in self._services.items():
            traffic = _present(region, service)
            if traffic.shares == {traffic.newest: 100}:
                self._say(f"{region}: {traffic.newest} is already serving")
                continue
            service.give(traffic.shares, traffic.newest)
            url = _present(region, service).candidate_url
            if not url:
                self._say(
                    f"{region}: {traffic.newest} has no separate URL behind the load balancer, so "
                    "its share of traffic is monitored"
                )
                continue
            self._report(region, self._check(url))

    def roll(self) -> None:
        """Moves all traffic to the newest revisions in steps. Rolls back at the first failure.

        Raises:
            Unavailable: the rollout was rolled back. The message contains the reason.
        """
        before = {
            region: _present(region, service).shares for region, service in self._services.items()
        }
        begun_regions: list[str] = []
        try:
            for region, service in self._services.items():
                begun_regions.append(region)
                self._roll_region(region, service)
        except BaseException:  # including KeyboardInterrupt and bugs in this code
            for region in begun_regions:
                self._take_back(region, before[region])
            raise

    def go_back(self, revision: str) -> None:
        """Moves all traffic to `revision` immediately.

        Requires a single region, because revision names are region-specific.

        Raises:
            Unavailable: Cloud Run rejected the change, for example because the revision does not
                exist.
        """
        for region, service in self._services.items():
            service.give({revision: 100})
            self._say(f"{region}: {revision} serves")

    def _roll_region(self, region: str, service: CloudRunService) -> None:
        traffic = _present(region, service)
        candidate = traffic.newest
        others = {name: percent for name, percent in traffic.shares.items() if name != candidate}
        if not others:
            service.give({candidate: 100})
            self._say(f"{region}: {candidate} is already serving")
            self._check_public(region)  # an initial release hasn't been tested yet
            return
        # If an earlier rollout was interrupted, two revisions are serving, and the one with the
        # larger share gets most of the callers.
        stable = max(others, key=lambda name: others[name])
        for percent in self._steps:
            began_s = time.time()
            service.give(
                {candidate: percent, stable: 100 - percent}, candidate if percent < 100 else ""
            )
            self._say(f"{region}: {candidate} is at {percent}%")
            self._pause(self._watch_s)
            verdict = self._judge.verdict(region, candidate, began_s)
            self._say(f"{region}: {verdict}")
            if not verdict.is_good:
                raise Unavailable(f"{region}: {candidate} at {percent} %: {verdict}")
            self._check_public(region)

    def _check_public(self, region: str) -> None:
        if region in self._public_urls:
            self._report(region, self._check(self._public_urls[region]))

    def _take_back(self, region: str, shares: dict[str, int]) -> None:
        try:
            self._services[region].give(shares)
            self._say(f"{region}: back to {_shares(shares)}")
        except PenstockError as error:  # the other regions are rolled back anyway
            self._say(
                f"{region}: NOT rolled back to {_shares(shares)}; do it manually: {error.message}"
            )

    def _report(self, region: str, lines: Sequence[str]) -> None:
        for line in lines:
            self._say(f"{region}: {line}")


def _present(region: str, service: CloudRunService) -> Traffic:
    traffic = service.traffic()
    if traffic is None or not traffic.newest:
        raise Unavailable(f"{region}: the API does not exist yet: {service.name}")
    return traffic


def _shares(shares: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {percent} %" for name, percent in shares.items())
