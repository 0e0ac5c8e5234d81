"""`penstock doctor --cluster`: checks a deployed cluster from an operator's machine.

It queries the cluster with kubectl, and Google with the operator's credentials, and changes
nothing. The expected state is read from the deployment itself (its Deployments and ConfigMaps) and
from this release (its topics and tables). If the operator lacks access, the finding reports it.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from infra.local.doctor import Diagnosis
from infra.reports.tables import check_bigquery
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.transport import SubscriptionSettings, jobs_subscriptions
from shared.errors import PenstockError
from shared.models.catalog import Catalog
from shared.settings import Settings

CALL_LIMIT_S = 30.0
"""Time limit for one command. kubectl has a shorter limit for each of its requests."""
REQUEST_LIMIT_S = 10
GPU = "nvidia.com/gpu"
GPU_LABELS = (
    "cloud.google.com/gke-accelerator",
    "nvidia.com/gpu.present",
    "nvidia.com/device-plugin.config",
)
"""Labels on nodes that have GPUs, whether or not a driver and the plugin expose them."""
KEDA_CRDS = ("scaledobjects.keda.sh", "triggerauthentications.keda.sh")
METRICS_API = "v1beta1.external.metrics.k8s.io"
IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")
PING = """
import os, redis, sys
for name in "PENSTOCK_REDIS_URL", "PENSTOCK_RECORDS_URL":
    try:
        if url := os.environ.get(name):
            redis.Redis.from_url(url, socket_timeout=4, socket_connect_timeout=4).ping()
    except Exception as error:
        sys.exit(f"{name}: {error}")
"""
"""Python code that pings Redis. Every image contains Python with this library."""
TAKES_FUNCTIONS = ["python", "-m", "workers.functions"]
"""Command line for functions that pull jobs from RabbitMQ."""
WRONG_FILTER = "docs/how-to/troubleshoot.md#a-subscription-with-the-wrong-filter"

Manifest = Mapping[str, Any]
KINDS = ("secret", "configmap")


class CommandFailed(Exception):
    """A program failed or could not be run. The text is the last line of its output."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl for one namespace of one cluster."""

    namespace: str
    context: str = ""
    """A context from the kubeconfig. Empty means the current context."""

    @property
    def words(self) -> list[str]:
        context = ["--context", self.context] if self.context else []
        return ["kubectl", *context, "-n", self.namespace]

    def format(self, command: str) -> str:
        return " ".join([*self.words, command])

    def format_outside(self, command: str) -> str:
        """Returns a command that an operator can run for something outside our namespace."""
        return " ".join([*self.words[:-2], command])

    def run(self, *words: str) -> str:
        """Returns kubectl's output.

        Raises:
            CommandFailed: kubectl failed, or did not finish in time.
        """
        return run([*self.words, f"--request-timeout={REQUEST_LIMIT_S}s", *words])

    def read(self, *words: str) -> dict[str, Any]:
        """Returns one object or a list. Raises the same errors as `run`."""
        return self.run_json("get", *words)

    def run_json(self, *words: str) -> dict[str, Any]:
        """Returns kubectl's output, which is a JSON object. Raises the same errors as `run`."""
        output = self.run(*words, "-o", "json")
        try:
            answer = json.loads(output)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise CommandFailed(f"kubectl {' '.join(words)}: not a JSON object: {output[:80]!r}")
        return answer

    def items(self, *words: str) -> list[dict[str, Any]]:
        """Returns the objects in a list. Raises the same errors as `run`."""
        items: list[dict[str, Any]] = self.read(*words).get("items") or []
        return items


def run(command: Sequence[str]) -> str:
    """Runs a program and returns its output.

    Raises:
        CommandFailed: the program could not be run, failed, or did not finish in time.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CALL_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailed(f"{command[0]}: {error}") from error
    if done.returncode:
        # kubectl appends a line about the exit status to the command's output.
        lines = [
            line
            for line in done.stderr.splitlines()
            if line.strip() and not line.startswith("command terminated with exit code")
        ]
        raise CommandFailed(lines[-1] if lines else f"{command[0]} ended with {done.returncode}")
    return done.stdout


@dataclass(frozen=True)
class ClusterDoctor:
    """The checks for one deployment."""

    kubectl: Kubectl
    catalog: Catalog
    own: Settings
    """The operator's settings. They override the deployment's if they are set."""
    ack_deadline_s: int = 10
    """Ack deadline of workers' subscriptions, as in Terraform's `delivery.ack_deadline_s`."""

    def findings(self) -> Iterator[Diagnosis]:
        """Yields every finding.

        The cluster comes first, because its settings locate everything else.
        """
        access = self._access()
        yield access
        checks: dict[str, Callable[[], Iterator[Diagnosis]]] = {}
        if not access.fix:
            checks |= {
                "autoscaler": self._keda,
                "GPU nodes": self._nodes,
                "device plugin": self._plugin,
                "pods": self._pods,
                "secrets": self._check_named_objects,
                "images": self._images,
                "Redis": self._redis,
                "Google": self._google,
            }
        elif "project" in self.own.model_fields_set:
            checks["Pub/Sub"] = lambda: self._topics(self.own)
            checks["BigQuery"] = lambda: iter([_tables(self.own)])
        for name, check in checks.items():
            try:
                yield from check()
            except CommandFailed as error:
                yield Diagnosis(name, str(error), self._fix_of(error))

    def _access(self) -> Diagnosis:
        if shutil.which("kubectl") is None:
            return Diagnosis(
                "kubectl", "not installed", "install it: gcloud components install kubectl"
            )
        try:
            version = self.kubectl.run_json("version")
            self.kubectl.read("namespace", self.kubectl.namespace)
        except CommandFailed as error:
            return Diagnosis("cluster", str(error), self._fix_of(error))
        server = version.get("serverVersion", {}).get("gitVersion", "of an unknown version")
        return Diagnosis("cluster", f"Kubernetes {server}, namespace {self.kubectl.namespace}")

    def _fix_of(self, error: CommandFailed) -> str:
        text = str(error)
        if "context" in text and "does not exist" in text:
            return "choose one with --context: kubectl config get-contexts"
        if "orbidden" in text:
            return "ask for read access: " + self.kubectl.format("auth can-i --list")
        if "namespaces" in text and "not found" in text:
            return "deploy the workers, or name it with --namespace: kubectl get namespaces"
        if "nauthorized" in text or "logged in" in text:
            return "log in again: gcloud auth login --update-adc"
        if "onnect" in text or "imeout" in text or "no such host" in text or "refused" in text:
            return (
                "get the cluster's address: gcloud container clusters get-credentials "
                "penstock-REGION --location REGION --dns-endpoint"
            )
        return self.kubectl.format("get all")

    @cached_property
    def _deployments(self) -> list[dict[str, Any]]:
        return self.kubectl.items("deployments")

    @cached_property
    def _running(self) -> list[dict[str, Any]]:
        return self.kubectl.items("pods")

    @cached_property
    def _all_nodes(self) -> list[dict[str, Any]]:
        return self.kubectl.items("nodes")

    @cached_property
    def _settings(self) -> dict[str, str]:
        """Returns the deployed processes' settings, from the ConfigMaps used by pods."""
        for deployment in self._deployments:
            settings: dict[str, str] = {}
            names = _references(_pod_spec(deployment))["configmap"] & self._configmaps
            if names:
                answer = self.kubectl.read("configmap", *sorted(names))
                # kubectl returns a list if there are several names.
                for configmap in answer.get("items", [answer]):
                    settings |= configmap.get("data", {})
            if "PENSTOCK_PROJECT" in settings:
                return settings
        return {}

    @cached_property
    def _wanted(self) -> dict[str, set[str]]:
        """Returns the names of the Secrets and ConfigMaps that pods require to start, by kind."""
        references = [_references(_pod_spec(deployment)) for deployment in self._deployments]
        return {kind: set().union(*(names[kind] for names in references)) for kind in KINDS}

    @cached_property
    def _configmaps(self) -> set[str]:
        """Returns the required ConfigMaps that exist."""
        return self._existing("configmap", self._wanted["configmap"])

    def _keda(self) -> Iterator[Diagnosis]:
        crds = set(self.kubectl.run("get", "crds", "-o", "name").split())
        missing = [
            name
            for name in KEDA_CRDS
            if f"customresourcedefinition.apiextensions.k8s.io/{name}" not in crds
        ]
        if missing and not self._is_on_gke():
            facts = "KEDA is missing, which is fine if the site has no `autoscaling`"
            yield Diagnosis("autoscaler", facts)
            return
        if missing:
            yield Diagnosis(
                "autoscaler",
                f"KEDA is missing ({', '.join(missing)}), so nothing scales the workers",
                "apply infra/terraform/workloads, or: helm upgrade --install keda kedacore/keda "
                "--namespace keda --create-namespace",
            )
            return
        yield self._metrics_api()
        for scaled_object in self.kubectl.items("scaledobjects"):
            yield from self._check_scaled_object(scaled_object)

    def _is_on_gke(self) -> bool:
        return any(
            label.startswith("cloud.google.com/gke-")
            for node in self._all_nodes
            for label in node["metadata"].get("labels", {})
        )

    def _metrics_api(self) -> Diagnosis:
        try:
            service = self.kubectl.read("apiservice", METRICS_API)
        except CommandFailed as error:
            if "not found" not in str(error):
                raise
            facts = f"KEDA's metrics server is not registered ({METRICS_API})"
            return Diagnosis("autoscaler", facts, self.kubectl.format_outside("-n keda get pods"))
        condition = _condition(service, "Available")
        if condition.get("status") == "True":
            return Diagnosis("autoscaler", "KEDA is installed, and its metrics server responds")
        return Diagnosis(
            "autoscaler",
            f"KEDA's metrics server does not respond: {condition.get('message', 'no reason')}",
            self.kubectl.format_outside("-n keda logs deployment/keda-operator-metrics-apiserver"),
        )

    def _check_scaled_object(self, manifest: Manifest) -> Iterator[Diagnosis]:
        name = manifest["metadata"]["name"]
        ready, fallback, paused = (
            _condition(manifest, kind) for kind in ("Ready", "Fallback", "Paused")
        )
        show = self.kubectl.format(f"describe scaledobject {name}")
        if ready.get("status") == "False":
            yield Diagnosis("autoscaler", f"{name}: {ready.get('message', 'not ready')}", show)
        if fallback.get("status") == "True":
            facts = f"{name}: has no metrics, so its worker count stays the same"
            yield Diagnosis("autoscaler", facts, show)
        if paused.get("status") == "True":
            resume = f"annotate scaledobject {name} autoscaling.keda.sh/paused-replicas-"
            yield Diagnosis("autoscaler", f"{name}: paused", self.kubectl.format(resume))

    def _nodes(self) -> Iterator[Diagnosis]:
        nodes = self._all_nodes
        equipped = [
            node
            for node in nodes
            if any(label in node["metadata"].get("labels", {}) for label in GPU_LABELS)
        ]
        offered = {
            node["metadata"]["name"]: int(node["status"].get("allocatable", {}).get(GPU, "0"))
            for node in nodes
        }
        for node in equipped:
            name = node["metadata"]["name"]
            if _condition(node, "Ready").get("status") != "True":
                reason = _condition(node, "Ready").get("message", "no reason")
                show = self.kubectl.format_outside(f"describe node {name}")
                yield Diagnosis("GPU nodes", f"{name} is not ready: {reason}", show)
            elif not offered[name]:
                facts = (
                    f"{name} has a GPU according to its labels, but offers no {GPU}: check its "
                    "driver and device plugin"
                )
                on_it = f"get pods -A -o wide --field-selector spec.nodeName={name}"
                yield Diagnosis("GPU nodes", facts, self.kubectl.format_outside(on_it))
        total = sum(offered.values())
        having = sum(map(bool, offered.values()))
        yield Diagnosis("GPU nodes", f"{having} of {len(nodes)} nodes offer {total} {GPU}")

    def _plugin(self) -> Iterator[Diagnosis]:
        plugins = [
            daemon_set
            for daemon_set in self.kubectl.items("daemonsets", "-A")
            if re.search(
                "nvidia.*device-plugin|device-plugin.*nvidia", daemon_set["metadata"]["name"]
            )
        ]
        wants_gpu = any(
            GPU in container.get("resources", {}).get("limits", {})
            for deployment in self._deployments
            for container in _pod_spec(deployment)["containers"]
        )
        if wants_gpu and not plugins:
            yield Diagnosis(
                "device plugin",
                f"none is running, so no node offers {GPU}",
                'install NVIDIA\'s; see "Workers that share a GPU" in docs/how-to/self-hosting.md',
            )
        for plugin in plugins:
            name, status = plugin["metadata"]["name"], plugin["status"]
            ready, wanted = status.get("numberReady", 0), status.get("desiredNumberScheduled", 0)
            facts = f"{name}: {ready} of {wanted} pods are ready"
            namespace = plugin["metadata"]["namespace"]
            show = self.kubectl.format_outside(f"-n {namespace} describe daemonset {name}")
            yield Diagnosis("device plugin", facts, show if ready < wanted else "")

    def _pods(self) -> Iterator[Diagnosis]:
        troubles = [trouble for pod in self._running for trouble in self._pod(pod)]
        phases = Counter(pod["status"].get("phase", "Unknown") for pod in self._running)
        counts = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))
        yield Diagnosis("pods", counts or "none")
        yield from troubles

    def _pod(self, pod: Manifest) -> Iterator[Diagnosis]:
        name, status = pod["metadata"]["name"], pod["status"]
        scheduled = _condition(pod, "PodScheduled")
        if scheduled.get("status") == "False":
            facts = f"{name} is pending: {scheduled.get('message', 'no reason')}"
            events = self.kubectl.format("get events --sort-by=.lastTimestamp")
            yield Diagnosis("pods", facts, f"{events} (docs/how-to/troubleshoot.md#gpu-stock-out)")
        kinds = "initContainerStatuses", "containerStatuses"
        for container in chain.from_iterable(status.get(kind, ()) for kind in kinds):
            waiting = container.get("state", {}).get("waiting", {})
            reason, message = waiting.get("reason", ""), waiting.get("message", "")
            if reason in ("", "PodInitializing", "ContainerCreating"):
                continue
            facts = f"{name}: {reason}{f': {message}' if message else ''}"
            kind = "images" if reason in IMAGE_REASONS else "pods"
            yield Diagnosis(kind, facts, self._fix_of_waiting(name, container["name"], reason))

    def _fix_of_waiting(self, pod: str, container: str, reason: str) -> str:
        if reason in IMAGE_REASONS:
            return "push the image, or let the nodes' account read the registry: " + (
                self.kubectl.format(f"describe pod {pod}")
            )
        if reason == "CrashLoopBackOff":
            return self.kubectl.format(f"logs {pod} -c {container} --previous")
        return self.kubectl.format(f"describe pod {pod}")

    def _check_named_objects(self) -> Iterator[Diagnosis]:
        """Checks Secrets and ConfigMaps that pods refer to, without reading their contents."""
        for kind, names in self._wanted.items():
            existing = self._configmaps if kind == "configmap" else self._existing(kind, names)
            for name in sorted(names - existing):
                if kind == "secret":
                    command = f"create secret generic {name} --from-…=…"
                    fix = f"{self.kubectl.format(command)} (docs/how-to/self-hosting.md)"
                else:
                    fix = "apply the overlay or the release again, which creates them"
                yield Diagnosis(f"{kind}s", f"{name} is missing", fix)
            yield Diagnosis(
                f"{kind}s", f"{len(existing)} of the {len(names)} that pods reference exist"
            )

    def _existing(self, kind: str, names: Collection[str]) -> set[str]:
        """Looks up all names in a single call, because each call is slow."""
        if not names:
            return set()
        words = ("get", kind, *sorted(names), "-o", "name", "--ignore-not-found")
        return {line.partition("/")[2] for line in self.kubectl.run(*words).split()}

    def _images(self) -> Iterator[Diagnosis]:
        """Checks for images in Artifact Registry, which may be gone while pods are running."""
        images = {
            container["image"]
            for deployment in self._deployments
            for container in _pod_spec(deployment)["containers"]
        }
        ours = sorted(image for image in images if "-docker.pkg.dev/" in image)
        if ours and shutil.which("gcloud") is None:
            facts = f"gcloud is missing, so {len(ours)} images were not checked"
            yield Diagnosis("images", facts, "install the Google Cloud CLI")
            return
        for image in ours:
            words = ["gcloud", "artifacts", "docker", "images", "describe", image]
            try:
                run([*words, "--format=value(image_summary.digest)"])
            except CommandFailed as error:
                yield Diagnosis("images", f"{image}: {error}", " ".join(words))
            else:
                yield Diagnosis("images", f"{image} is in its registry")

    def _redis(self) -> Iterator[Diagnosis]:
        """Queries Redis from a pod, with the pod's settings and through its network policies."""
        pods = [
            pod
            for pod in self._running
            if re.match(
                "penstock-(worker|api)$",
                pod["metadata"].get("labels", {}).get("app.kubernetes.io/name", ""),
            )
            and _condition(pod, "Ready").get("status") == "True"
        ]
        if not pods:
            show = self.kubectl.format("get pods")
            yield Diagnosis("Redis", "not checked: no worker or API pod is ready", show)
            return
        name = pods[0]["metadata"]["name"]
        try:
            self.kubectl.run("exec", name, "--", "python", "-c", PING)
        except CommandFailed as error:
            fix = "check the network policies and Redis: " + self.kubectl.format(
                "get networkpolicies"
            )
            yield Diagnosis("Redis", f"unreachable from {name}: {error}", fix)
        else:
            yield Diagnosis("Redis", f"responds to {name}")

    def _google(self) -> Iterator[Diagnosis]:
        """Checks the topics and tables in the deployment's project."""
        deployed = {
            name: self._settings[variable]
            for name in ("project", "dataset")
            if (variable := f"PENSTOCK_{name.upper()}") in self._settings
        }
        own = {name: getattr(self.own, name) for name in self.own.model_fields_set}
        if "project" not in deployed | own:
            facts = "no Deployment sets PENSTOCK_PROJECT"
            yield Diagnosis("Google", facts, "set PENSTOCK_PROJECT, or deploy the workers")
            return
        settings = self.own.model_copy(update=deployed | own)
        if self._takes_from_rabbitmq():
            yield Diagnosis("RabbitMQ", "not checked: use penstock doctor with PENSTOCK_BROKER")
        elif place := self._place_inside("PENSTOCK_PUBSUB_ENDPOINT", settings.pubsub_endpoint):
            yield self._not_checked("Pub/Sub", "PENSTOCK_PUBSUB_ENDPOINT", place)
        else:
            yield from self._topics(settings)
        variable = "PENSTOCK_BIGQUERY_ENDPOINT"
        if place := self._place_inside(variable, settings.bigquery_endpoint):
            yield self._not_checked("BigQuery", variable, place)
        else:
            yield _tables(settings)

    def _topics(self, settings: Settings) -> Iterator[Diagnosis]:
        try:
            existing = asyncio.run(_subscriptions(settings))
        except PenstockError as error:
            login = "gcloud auth application-default login"
            yield Diagnosis("Pub/Sub", f"{settings.project}: {error.message}", login)
            return
        wanted = {
            name: subscription
            for model in self.catalog.deployed
            for name, subscription in jobs_subscriptions(model.name).items()
        }
        right = 0
        for name, subscription in wanted.items():
            if subscription.dead_letter_topic_id:
                subscription = replace(subscription, ack_deadline_s=self.ack_deadline_s)
            facts, fix = _difference(name, subscription, existing.get(name))
            right += not facts
            if facts:
                yield Diagnosis("Pub/Sub", f"{name} {facts}", fix)
        facts = f"{settings.project}: {right} of {len(wanted)} job subscriptions are correct"
        yield Diagnosis("Pub/Sub", facts)

    def _takes_from_rabbitmq(self) -> bool:
        return any(
            container.get("command") == TAKES_FUNCTIONS
            for deployment in self._deployments
            for container in _pod_spec(deployment)["containers"]
        )

    def _place_inside(self, variable: str, own: str) -> str:
        """Returns an embedded server's address in the cluster, unless the operator overrides it."""
        return "" if own else self._settings.get(variable, "")

    def _not_checked(self, service: str, variable: str, place: str) -> Diagnosis:
        scheme, _, address = place.rpartition("://")
        host, _, port = address.partition(":")
        local = f"{scheme}{'://' if scheme else ''}127.0.0.1:{port}"
        forward = self.kubectl.format(f"port-forward service/{host} {port}")
        facts = (
            f"not checked, because it runs in the cluster: {forward}, then set {variable}={local}"
        )
        return Diagnosis(service, facts)


def _tables(settings: Settings) -> Diagnosis:
    place = f"{settings.project}.{settings.dataset}"
    try:
        check_bigquery(settings, REQUEST_LIMIT_S)
    except PenstockError as error:
        fix = "apply this release's platform before its workers: terraform apply"
        return Diagnosis("BigQuery", f"{place}: {error.message}", fix)
    return Diagnosis("BigQuery", f"{place}: all tables have this release's columns")


def _pod_spec(deployment: Manifest) -> Manifest:
    spec: Manifest = deployment["spec"]["template"]["spec"]
    return spec


def _condition(manifest: Manifest, kind: str) -> Mapping[str, str]:
    conditions: Iterable[Mapping[str, str]] = manifest.get("status", {}).get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _references(pod: Manifest) -> dict[str, set[str]]:
    """Returns the Secrets and ConfigMaps that a pod requires to start."""
    names: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        for source in container.get("envFrom", ()):
            for kind, key in (("secret", "secretRef"), ("configmap", "configMapRef")):
                if key in source and not source[key].get("optional"):
                    names[kind].add(source[key]["name"])
    for volume in pod.get("volumes", ()):
        for key, name in (("secret", "secretName"), ("configMap", "name")):
            if key in volume and not volume[key].get("optional"):
                names[key.lower()].add(volume[key][name])
    return names


async def _subscriptions(settings: Settings) -> dict[str, SubscriptionSettings]:
    async with PubSubAdmin(
        settings.project, settings.pubsub_endpoint, timeout_s=REQUEST_LIMIT_S
    ) as admin:
        return await admin.subscriptions()


def _difference(
    name: str, wanted: SubscriptionSettings, existing: SubscriptionSettings | None
) -> tuple[str, str]:
    """Returns how a subscription differs from this release's, and the next command to run."""
    apply = "terraform apply (docs/how-to/deploy.md#add-a-model)"
    if existing is None:
        return "is missing", apply
    if existing.topic_id != wanted.topic_id:
        facts = f"is on the topic {existing.topic_id}, not {wanted.topic_id}"
        return facts, f"gcloud pubsub subscriptions delete {name}, then {apply}"
    if existing.filter != wanted.filter:
        facts = f"has the filter {existing.filter!r}, not {wanted.filter!r}"
        return facts, f"keep its jobs in a snapshot first: {WRONG_FILTER}"
    if existing.ack_deadline_s != wanted.ack_deadline_s:
        facts = (
            f"has an ack deadline of {existing.ack_deadline_s} s, not {wanted.ack_deadline_s} s: a "
            "job waits that long after its worker dies"
        )
        update = f"gcloud pubsub subscriptions update {name} --ack-deadline"
        return facts, f"{update}={wanted.ack_deadline_s}"
    if existing.dead_letter_topic_id != wanted.dead_letter_topic_id:
        facts = f"sends dead letters to {existing.dead_letter_topic_id or 'no topic'}"
        return f"{facts}, not to {wanted.dead_letter_topic_id}", apply
    return "", ""
