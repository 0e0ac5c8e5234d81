"""`python -m workers.gpu_nodes`: drains nodes whose GPU has failed; one deployment per cluster.

A device plugin or node-problem-detector reports the failure as a node condition. Nothing else acts
on it, because GKE's node auto-repair checks only `Ready` and disks, and a failing pod is restarted
on the same GPU. This process therefore cordons the node and evicts its pods, as `kubectl drain`
does. Evictions respect disruption budgets, pods drain and hand back their jobs, and replacements
are scheduled elsewhere. The cluster autoscaler deletes the empty node.

At most a tenth of all GPU nodes (but at least one) may be cordoned at a time, so a driver that
reports every GPU as broken can't empty the cluster. A node goes back into service when its
condition clears.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.logs import configure_logs

CONDITIONS = ("XidCriticalError",)
"""Node conditions, as set by GKE's device plugin, or by node-problem-detector elsewhere
(infra/kubernetes/gpu-nodes/gpu-monitor.json).
"""
ANNOTATION = "penstock.dev/gpu-failed"
"""Set on nodes cordoned by this process. Nodes cordoned by anything else are left alone."""
SELECTOR = "app.kubernetes.io/name in (penstock-worker,penstock-balloon)"
GPU = "nvidia.com/gpu"
MAX_SHARE = 0.1
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_LIMIT_S = 20.0
PAGE = 500

log = logging.getLogger(__name__)

Json = dict[str, Any]


class KubernetesApi:
    """The few Kubernetes calls needed here, made with the pod's identity.

    Args:
        token_file: file with the token, which is read for each call because the kubelet renews it.
        ca_file: the API server's CA certificate. None means plain HTTP.
    """

    def __init__(self, url: str, token_file: Path, ca_file: Path | None) -> None:
        self._url = url
        self._token_file = token_file
        self._context = None if ca_file is None else ssl.create_default_context(cafile=str(ca_file))

    def items(self, path: str, **query: str) -> Iterator[Json]:
        """Yields a list's objects, page by page.

        Raises:
            OSError: the API server is unreachable, or rejects the request.
        """
        after = ""
        while True:
            parameters = {**query, "limit": str(PAGE)} | ({"continue": after} if after else {})
            page = self.call("GET", f"{path}?{urllib.parse.urlencode(parameters)}")
            yield from page["items"]
            after = page.get("metadata", {}).get("continue") or ""
            if not after:
                return

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """Sends a request, and returns the response.

        Raises:
            OSError: the API server is unreachable, its response is cut off or is not JSON, or it
                rejects the request (urllib.error.HTTPError).
        """
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self._token_file.read_text(encoding='ascii').strip()}",
                "Content-Type": kind,
            },
        )
        try:
            with urllib.request.urlopen(
                request, timeout=REQUEST_LIMIT_S, context=self._context
            ) as answer:
                decoded: Json = json.load(answer)
        except (http.client.HTTPException, ValueError) as error:
            raise ConnectionError(f"{method} {path}: broken response: {error}") from error
        return decoded


@dataclass
class Round:
    """The results of one check, as node and pod names."""

    cordoned: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Pods that can't be evicted yet, usually because of their disruption budget."""
    waiting: list[str] = field(default_factory=list)
    """Nodes not cordoned because of the limit."""
    released: list[str] = field(default_factory=list)


class GpuNodes:
    """Drains nodes whose GPU has failed.

    Args:
        conditions: node conditions that report a failed GPU.
    """

    def __init__(
        self, api: KubernetesApi, namespace: str, conditions: Sequence[str] = CONDITIONS
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._conditions = frozenset(conditions)

    def look(self) -> Round:
        """Checks all nodes once.

        Raises:
            OSError: the API server is unreachable, or rejects a request other than an eviction.
        """
        done = Round()
        nodes = [node for node in self._api.items("/api/v1/nodes") if _has_gpu(node)]
        ours = {_name(node) for node in nodes if ANNOTATION in _annotations(node)}
        failed = sorted(
            (since, _name(node))
            for node in nodes
            if (since := self._find_failure_time(node)) is not None
            and (_name(node) in ours or not _is_cordoned(node))
        )
        names = {name for _, name in failed}
        for name in sorted(ours - names):
            self._mark(name, reason=None)
            done.released.append(name)
        max_cordoned, cordoned = max(1, int(len(nodes) * MAX_SHARE)), len(ours & names)
        for since, name in failed:
            if name not in ours:
                if cordoned >= max_cordoned:
                    done.waiting.append(name)
                    continue
                cordoned += 1
                self._mark(name, reason=since)
                done.cordoned.append(name)
            self._evict_from(name, done)
        return done

    def _find_failure_time(self, node: Json) -> str | None:
        """Returns when the node's GPU failed, or None if it hasn't."""
        times = [
            str(condition.get("lastTransitionTime", ""))
            for condition in node.get("status", {}).get("conditions", ())
            if condition["type"] in self._conditions and condition["status"] == "True"
        ]
        return min(times, default=None)

    def _mark(self, name: str, reason: str | None) -> None:
        """Cordons a node, or uncordons it if no reason is given."""
        body = {
            "metadata": {"annotations": {ANNOTATION: reason}},
            "spec": {"unschedulable": True if reason is not None else None},
        }
        self._api.call("PATCH", f"/api/v1/nodes/{name}", body)
        log.warning("node released" if reason is None else "node cordoned", extra={"node": name})

    def _evict_from(self, node: str, done: Round) -> None:
        pods = f"/api/v1/namespaces/{self._namespace}/pods"
        for pod in self._api.items(
            pods, labelSelector=SELECTOR, fieldSelector=f"spec.nodeName={node}"
        ):
            name = _name(pod)
            if pod["metadata"].get("deletionTimestamp"):
                continue
            metadata = {"name": name, "namespace": self._namespace}
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
            try:
                self._api.call("POST", f"{pods}/{name}/eviction", body)
            except urllib.error.HTTPError as error:
                if error.code == 404:  # already gone
                    continue
                done.refused.append(name)
                if error.code != 429:  # not just because of the disruption budget
                    facts = {"pod": name, "node": node, "error": str(error)}
                    log.warning("pod not evicted", extra=facts)
                continue
            log.warning("pod evicted", extra={"pod": name, "node": node})
            done.evicted.append(name)


def _name(node: Json) -> str:
    return str(node["metadata"]["name"])


def _annotations(node: Json) -> Json:
    return node["metadata"].get("annotations") or {}


def _is_cordoned(node: Json) -> bool:
    return bool(node.get("spec", {}).get("unschedulable"))


def _has_gpu(node: Json) -> bool:
    # `allocatable` drops to 0 when the plugin withdraws a broken GPU.
    return int(node.get("status", {}).get("capacity", {}).get(GPU, 0)) > 0


def _url() -> str:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


def main(argv: Sequence[str] | None = None) -> None:
    """Checks the nodes repeatedly until stopped."""
    parser = argparse.ArgumentParser(prog="workers.gpu_nodes", description=__doc__)
    parser.add_argument("--url", default=_url(), help="API server (default: this cluster's)")
    parser.add_argument(
        "--account", type=Path, default=ACCOUNT, help="folder that contains the identity"
    )
    parser.add_argument("--condition", action="append", help=f"default: {CONDITIONS[0]}")
    parser.add_argument("--every-s", type=float, default=15.0)
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args(argv)
    configure_logs("INFO")
    ca_file = options.account / "ca.crt"
    api = KubernetesApi(
        options.url, options.account / "token", ca_file if options.url.startswith("https") else None
    )
    namespace = (options.account / "namespace").read_text(encoding="ascii").strip()
    nodes = GpuNodes(api, namespace, options.condition or CONDITIONS)
    while True:
        try:
            done = nodes.look()
        except OSError as error:
            log.warning("the nodes could not be checked", extra={"error": str(error)})
        else:
            if done.waiting:
                log.error("too many GPUs have failed at once", extra={"nodes": done.waiting})
        if options.once:
            return
        time.sleep(options.every_s)


if __name__ == "__main__":
    main()
