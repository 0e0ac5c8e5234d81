"""Nodes with a failed GPU are drained, within disruption budgets, and never all at once.

Runs against an API server that is as strict as Kubernetes about permissions and content types.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.limits import START_LIMIT_S
from workers.gpu_nodes import ANNOTATION, GpuNodes, KubernetesApi, Round

TOKEN = "token-of-the-pod"
PODS = "/api/v1/namespaces/penstock/pods"


@dataclass
class Cluster:
    """Nodes, and the pods on each of them.

    `held`: pods that their disruption budget protects from eviction.
    """

    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, str] = field(default_factory=dict)
    """Each pod's node."""
    held: set[str] = field(default_factory=set)
    unevictable: set[str] = field(default_factory=set)
    """Pods with two disruption budgets, which Kubernetes never evicts."""
    url: str = ""
    cuts_off: bool = False
    """True if responses are cut off before the end of the body."""

    def add(self, name: str, *pods: str, gpus: int = 1, failed_at: str | None = None) -> None:
        self.nodes[name] = {
            "metadata": {"name": name, "annotations": {"other": "kept"}},
            "spec": {},
            "status": {"capacity": {"cpu": "8", "nvidia.com/gpu": str(gpus)}, "conditions": []},
        }
        self.pods |= dict.fromkeys(pods, name)
        self.tell(name, failed_at)

    def tell(self, name: str, failed_at: str | None) -> None:
        status, since = ("True", failed_at) if failed_at else ("False", "2026-11-26T00:00:00Z")
        self.nodes[name]["status"]["conditions"] = [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-25T00:00:00Z"},
            {"type": "XidCriticalError", "status": status, "lastTransitionTime": since},
        ]

    def cordoned(self) -> set[str]:
        return {name for name, node in self.nodes.items() if node["spec"].get("unschedulable")}

    # Responses, as (status, body).

    def get(self, path: str, query: dict[str, str]) -> tuple[int, Any]:
        limit, start = int(query["limit"]), int(query.get("continue", "0"))
        if path == "/api/v1/nodes":
            found: list[Any] = list(self.nodes.values())
        else:
            assert path == PODS
            assert query["labelSelector"].startswith("app.kubernetes.io/name in (penstock-worker,")
            node = query["fieldSelector"].removeprefix("spec.nodeName=")
            found = [{"metadata": {"name": pod}} for pod, at in self.pods.items() if at == node]
        after = str(start + limit) if start + limit < len(found) else ""
        return 200, {"items": found[start : start + limit], "metadata": {"continue": after}}

    def patch(self, path: str, body: Any, kind: str) -> tuple[int, Any]:
        assert kind == "application/merge-patch+json"
        node = self.nodes[path.removeprefix("/api/v1/nodes/")]
        merge(node, body)
        return 200, node

    def post(self, path: str, body: Any, kind: str) -> tuple[int, Any]:
        assert kind == "application/json"
        assert (body["apiVersion"], body["kind"]) == ("policy/v1", "Eviction")
        pod, name = body["metadata"]["name"], path.removeprefix(f"{PODS}/").split("/")
        assert name == [pod, "eviction"]
        if pod in self.held:
            return 429, {"message": "Cannot evict pod as it would violate the disruption budget."}
        if pod in self.unevictable:
            return 500, {"message": "This pod has more than one PodDisruptionBudget."}
        return (201, {}) if self.pods.pop(pod, None) else (404, {})


def merge(base: dict[str, Any], patch: dict[str, Any]) -> None:
    """A JSON merge patch (RFC 7386)."""
    for key, value in patch.items():
        if value is None:
            base.pop(key, None)
        elif isinstance(value, dict):
            merge(base.setdefault(key, {}), value)
        else:
            base[key] = value


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
            kind = self.headers["Content-Type"]
            content: Any
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                status, content = 401, None
            elif self.command == "GET":
                status, content = made.get(parts.path, query)
            elif self.command == "PATCH":
                status, content = made.patch(parts.path, body, kind)
            else:
                status, content = made.post(parts.path, body, kind)
            sent = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent[:-1] if made.cuts_off else sent)

        do_GET = do_PATCH = do_POST = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """The service account folder that the kubelet mounts."""
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "namespace").write_text("penstock")
    return tmp_path


def look(cluster: Cluster, account: Path) -> Round:
    return GpuNodes(KubernetesApi(cluster.url, account / "token", None), "penstock").look()


def test_a_node_whose_gpu_failed_is_cordoned_and_emptied(cluster: Cluster, account: Path) -> None:
    cluster.add("good", "worker-1")
    cluster.add("bad", "worker-2", "worker-3", failed_at="2026-11-26T10:00:00Z")
    cluster.add("no-gpu", "worker-4", gpus=0, failed_at="2026-11-26T10:00:00Z")
    done = look(cluster, account)
    assert (done.cordoned, done.evicted) == (["bad"], ["worker-2", "worker-3"])
    assert cluster.cordoned() == {"bad"}
    assert cluster.pods == {"worker-1": "good", "worker-4": "no-gpu"}
    annotations = cluster.nodes["bad"]["metadata"]["annotations"]
    assert annotations == {"other": "kept", ANNOTATION: "2026-11-26T10:00:00Z"}
    assert look(cluster, account) == Round(), "nothing is left to do"


def test_a_disruption_budget_is_asked_again(cluster: Cluster, account: Path) -> None:
    cluster.add("bad", "worker-1", "worker-2", failed_at="2026-11-26T10:00:00Z")
    cluster.held = {"worker-2"}
    done = look(cluster, account)
    assert (done.evicted, done.refused) == (["worker-1"], ["worker-2"])
    assert "worker-2" in cluster.pods
    cluster.held = set()
    assert look(cluster, account).evicted == ["worker-2"]


def test_a_pod_that_is_never_evicted_holds_up_no_other(cluster: Cluster, account: Path) -> None:
    cluster.add("bad", "worker-1", "worker-2", failed_at="2026-11-26T10:00:00Z")
    cluster.unevictable = {"worker-1"}
    done = look(cluster, account)
    assert (done.evicted, done.refused) == (["worker-2"], ["worker-1"])


@pytest.mark.parametrize(("nodes", "most"), [(3, 1), (25, 2), (601, 60)])
def test_no_more_than_a_tenth_at_a_time(
    cluster: Cluster, account: Path, nodes: int, most: int
) -> None:
    """Even if a driver reports every GPU as broken, nine-tenths of them stay in use."""
    for number in range(nodes):
        cluster.add(f"n{number:03}", f"w{number}", failed_at=f"2026-11-26T10:{number % 60:02}:00Z")
    done = look(cluster, account)
    assert (len(done.cordoned), len(done.waiting)) == (most, nodes - most)
    assert done.cordoned[0] == "n000", "the longest failed first"
    assert len(cluster.pods) == nodes - most
    assert look(cluster, account).cordoned == []
    # The autoscaler deletes empty nodes, and then the next node gets its turn.
    del cluster.nodes["n000"]
    assert len(look(cluster, account).cordoned) == 1


def test_a_repaired_node_serves_again(cluster: Cluster, account: Path) -> None:
    cluster.add("bad", failed_at="2026-11-26T10:00:00Z")
    cluster.add("theirs", failed_at=None)
    cluster.nodes["theirs"]["spec"]["unschedulable"] = True
    look(cluster, account)
    cluster.tell("bad", None)
    assert look(cluster, account).released == ["bad"]
    assert cluster.cordoned() == {"theirs"}, "what somebody else cordoned stays so"
    assert ANNOTATION not in cluster.nodes["bad"]["metadata"]["annotations"]


def test_a_node_that_somebody_else_cordoned_is_left_alone(cluster: Cluster, account: Path) -> None:
    cluster.add("theirs", "worker-1", failed_at="2026-11-26T10:00:00Z")
    cluster.nodes["theirs"]["spec"]["unschedulable"] = True
    assert look(cluster, account) == Round()
    cluster.tell("theirs", None)
    assert look(cluster, account) == Round()
    assert cluster.cordoned() == {"theirs"}


def run_once(cluster: Cluster, account: Path) -> subprocess.CompletedProcess[str]:
    """Runs one check the way the pod does."""
    command = [sys.executable, "-m", "workers.gpu_nodes", "--once", "--url", cluster.url]
    return subprocess.run(
        [*command, "--account", str(account)],
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )


def test_pod_reports_what_it_did(cluster: Cluster, account: Path) -> None:
    cluster.add("bad", "worker-1", failed_at="2026-11-26T10:00:00Z")
    done = run_once(cluster, account)
    assert done.returncode == 0, done.stderr
    assert cluster.cordoned() == {"bad"}
    said = [json.loads(line)["message"] for line in done.stderr.splitlines()]
    assert said == ["node cordoned", "pod evicted"]


def test_pod_survives_a_rejected_token(cluster: Cluster, account: Path) -> None:
    (account / "token").write_text("another")
    done = run_once(cluster, account)
    assert done.returncode == 0, done.stderr
    assert "HTTP Error 401" in done.stderr


def test_pod_survives_a_response_that_breaks_off(cluster: Cluster, account: Path) -> None:
    cluster.cuts_off = True
    done = run_once(cluster, account)
    assert done.returncode == 0, done.stderr
    assert "IncompleteRead" in done.stderr
