"""A stand-in for a cluster's API server, which the real kubectl talks to.

It uses TLS, because kubectl sends no token without it. It supports discovery, single objects,
lists, the version, tokens, permissions, and `exec` over WebSocket. An `exec` command runs on this
machine, with the settings from the pod's ConfigMaps.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import WSMsgType, web

from tests.limits import WAIT_LIMIT_S
from tests.tls import make_certificate

TOKEN = "operator"
Object = dict[str, Any]
RESOURCES: dict[str, dict[str, tuple[str, bool, list[str]]]] = {
    "v1": {
        "namespaces": ("Namespace", False, ["ns"]),
        "nodes": ("Node", False, ["no"]),
        "pods": ("Pod", True, ["po"]),
        "secrets": ("Secret", True, []),
        "configmaps": ("ConfigMap", True, ["cm"]),
        "services": ("Service", True, ["svc"]),
    },
    "apps/v1": {
        "deployments": ("Deployment", True, ["deploy"]),
        "daemonsets": ("DaemonSet", True, ["ds"]),
    },
    "apiextensions.k8s.io/v1": {
        "customresourcedefinitions": ("CustomResourceDefinition", False, ["crd", "crds"])
    },
    "apiregistration.k8s.io/v1": {"apiservices": ("APIService", False, [])},
    "keda.sh/v1alpha1": {"scaledobjects": ("ScaledObject", True, ["so"])},
}
"""The resources it serves, by API and plural: kind, whether it is namespaced, and short names."""


@dataclass
class Cluster:
    """A cluster's contents, and which of them may be read."""

    objects: list[Object]
    denied: set[str] = field(default_factory=set)
    """Plurals of the resources that the operator may not read."""
    port: int = 0
    authority: str = ""
    """Path of the certificate."""

    def of_kind(self, kind: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] == kind]

    def named(self, kind: str, name: str) -> Object:
        """The object whose name begins with this prefix."""
        return next(one for one in self.of_kind(kind) if one["metadata"]["name"].startswith(name))

    def remove(self, kind: str, name: str) -> None:
        self.objects.remove(self.named(kind, name))

    def kubeconfig(self, token: str = TOKEN) -> str:
        """A kubeconfig with the `production` context."""
        cluster = {
            "server": f"https://127.0.0.1:{self.port}",
            "certificate-authority": self.authority,
        }
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "production", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "production",
            }
        )

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return refusal(401, "Unauthorized", "Unauthorized")
        path = request.path.strip("/")
        if path == "version":
            return web.json_response({"major": "1", "minor": "35", "gitVersion": "v1.35.2-gke.1"})
        if path in ("api", "apis") or f"/{path}" in self._served():
            return web.json_response(self._discovery(path))
        return await self._objects(request, path)

    def _served(self) -> dict[str, str]:
        # Custom resources exist only if their definitions do.
        there = {one["spec"]["group"] for one in self.of_kind("CustomResourceDefinition")}
        return {
            f"/api/{api}" if api == "v1" else f"/apis/{api}": api
            for api in RESOURCES
            if not api.startswith("keda.sh/") or "keda.sh" in there
        }

    def _discovery(self, path: str) -> Object:
        if path == "api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "apis":
            groups = [api.split("/") for api in self._served().values() if api != "v1"]
            listed = [
                {
                    "name": group,
                    "versions": [{"groupVersion": f"{group}/{version}", "version": version}],
                    "preferredVersion": {"groupVersion": f"{group}/{version}", "version": version},
                }
                for group, version in groups
            ]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        api = self._served()[f"/{path}"]
        resources = [
            {
                "name": plural,
                "singularName": kind.lower(),
                "namespaced": namespaced,
                "kind": kind,
                "verbs": ["get", "list"],
                "shortNames": short,
            }
            for plural, (kind, namespaced, short) in RESOURCES[api].items()
        ]
        return {"kind": "APIResourceList", "groupVersion": api, "resources": resources}

    async def _objects(self, request: web.Request, path: str) -> web.StreamResponse:
        for prefix, api in self._served().items():
            if not f"/{path}/".startswith(f"{prefix}/"):
                continue
            parts = path.removeprefix(prefix.strip("/")).strip("/").split("/")
            namespace = ""
            if parts[0] == "namespaces" and len(parts) > 2:
                namespace, parts = parts[1], parts[2:]
            if parts[0] in RESOURCES[api]:
                return await self._resource(request, api, namespace, parts)
        return refusal(404, "NotFound", "the server could not find the requested resource")

    async def _resource(
        self, request: web.Request, api: str, namespace: str, parts: list[str]
    ) -> web.StreamResponse:
        plural, kind = parts[0], RESOURCES[api][parts[0]][0]
        group = api.partition("/")[0] if "/" in api else ""
        qualified = f"{plural}.{group}" if group else plural
        if plural in self.denied:
            what = f'{qualified} is forbidden: User "operator" cannot list resource "{plural}"'
            return refusal(403, "Forbidden", what)
        chosen = [
            one
            for one in self.of_kind(kind)
            if namespace in ("", one["metadata"].get("namespace", ""))
        ]
        if len(parts) == 1:
            return web.json_response(
                {"kind": f"{kind}List", "apiVersion": api, "metadata": {}, "items": chosen}
            )
        for one in chosen:
            if one["metadata"]["name"] == parts[1]:
                return await self._exec(request, one) if parts[2:] else web.json_response(one)
        return refusal(404, "NotFound", f'{qualified} "{parts[1]}" not found')

    async def _exec(self, request: web.Request, pod: Object) -> web.StreamResponse:
        """https://kubernetes.io/docs/reference, subprotocol v5.channel.k8s.io."""
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io",))
        await socket.prepare(request)
        words = request.query.getall("command")
        environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        for source in pod["spec"]["containers"][0].get("envFrom", ()):
            if "configMapRef" in source:
                environment |= self.named("ConfigMap", source["configMapRef"]["name"])["data"]
        done = await asyncio.to_thread(
            subprocess.run,
            words,
            env=environment,
            capture_output=True,
            timeout=WAIT_LIMIT_S,
            check=False,
        )
        await socket.send_bytes(b"\x01" + done.stdout)
        await socket.send_bytes(b"\x02" + done.stderr)
        status: Object = {"metadata": {}, "status": "Success"}
        if done.returncode:
            cause = {"reason": "ExitCode", "message": str(done.returncode)}
            status = {
                "metadata": {},
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "message": f"command terminated with exit code {done.returncode}",
                "details": {"causes": [cause]},
            }
        await socket.send_bytes(b"\x03" + json.dumps(status).encode())
        await socket.close()
        async for message in socket:
            assert message.type is not WSMsgType.ERROR
        return socket


def refusal(code: int, reason: str, message: str) -> web.Response:
    """A Status object, in the API server's format."""
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }
    return web.json_response(status, status=code)


@contextmanager
def served(cluster: Cluster, folder: Path) -> Iterator[Cluster]:
    """The cluster's API server, on its own port, with its certificate in `folder`."""
    certificate = make_certificate(folder)
    cluster.authority = str(certificate.cert)
    encryption = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    encryption.load_cert_chain(certificate.cert, certificate.key)
    loop = asyncio.new_event_loop()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", cluster.answer)
    runner = web.AppRunner(application)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=encryption)
        await site.start()
        cluster.port = runner.addresses[0][1]

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield cluster
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(WAIT_LIMIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_LIMIT_S)
        loop.close()
