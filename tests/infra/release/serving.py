"""Running services: Cloud Run, Monitoring, secrets, and the API behind Google's front end."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import yaml
from google_crc32c import value as crc32c

from shared.models.catalog import CANARY_SUFFIX
from tests.infra.release.api import NUMBER, Api, Ask, Refusal, Reply, route


class Serving(Api):
    """The API's service, as its callers see it."""

    @route(
        "GET",
        "secretmanager.googleapis.com",
        r"/v1/projects/[^/]+/secrets/([^/]+)/versions/([^/:]+):access",
    )
    def _access(self, ask: Ask, secret: str, _: str) -> Any:
        self.require(ask, "secretmanager.versions.access", f"secrets/{secret}")
        versions = self._versions(secret)
        if not versions:
            raise Refusal(404, f"Secret [{secret}] has no versions.")
        return {
            "name": f"projects/{NUMBER}/secrets/{secret}/versions/{len(versions)}",
            "payload": {
                "data": base64.b64encode(versions[-1]).decode(),
                "dataCrc32c": str(crc32c(versions[-1])),
            },
        }

    @route(
        "POST", "secretmanager.googleapis.com", r"/v1/projects/[^/]+/secrets/([^/:]+):addVersion"
    )
    def _add_version(self, ask: Ask, secret: str) -> Any:
        self.require(ask, "secretmanager.versions.add", f"secrets/{secret}")
        self._versions(secret).append(base64.b64decode(ask.document["payload"]["data"]))
        number = len(self.secrets[secret])
        return {
            "name": f"projects/{NUMBER}/secrets/{secret}/versions/{number}",
            "state": "ENABLED",
            "clientSpecifiedPayloadChecksum": True,
        }

    def _versions(self, secret: str) -> list[bytes]:
        made = {value["secret_id"] for value in self.made("google_secret_manager_secret")}
        if secret not in made:
            raise Refusal(404, f"Secret [projects/{NUMBER}/secrets/{secret}] not found.")
        if secret.endswith("-api-keys") and not self.secrets[secret]:
            # Terraform's first version, which the state does not store.
            self.secrets[secret].append(b'{"plans": {}, "tenants": {}, "keys": []}')
        return self.secrets[secret]

    def _api(self) -> dict[str, Any] | None:
        return next(
            (
                found
                for found in self.made("google_cloud_run_v2_service")
                if found["name"] == "penstock-api"
            ),
            None,
        )

    @staticmethod
    def _image_of(service: dict[str, Any]) -> str:
        containers = service["template"][0]["containers"]
        return str(next(one["image"] for one in containers if one["name"] == "api"))

    def _revision(self) -> str:
        service = self._api()
        assert service is not None
        digest = hashlib.sha256(self._image_of(service).encode()).hexdigest()
        return f"penstock-api-{digest[:5]}"

    @route("GET", "run.googleapis.com", r"/v2/projects/[^/]+/locations/[^/]+/services/penstock-api")
    def _get_service(self, ask: Ask) -> Any:
        self.require(ask, "run.services.get", f"projects/{self.project}")
        if self._api() is None:
            raise Refusal(404, "Resource 'penstock-api' of kind 'SERVICE' does not exist.")
        latest = {"type": "TRAFFIC_TARGET_ALLOCATION_TYPE_LATEST", "percent": 100}
        traffic = self.traffic or [latest]
        return {
            "latestReadyRevision": f"projects/x/revisions/{self._revision()}",
            "traffic": traffic,
            "trafficStatuses": [
                one | {"uri": f"https://candidate.{self.region}.run.app" if one.get("tag") else ""}
                for one in traffic
            ],
        }

    @route(
        "PATCH", "run.googleapis.com", r"/v2/projects/[^/]+/locations/[^/]+/services/penstock-api"
    )
    def _change_service(self, ask: Ask) -> Any:
        self.require(ask, "run.services.update", f"projects/{self.project}")
        assert ask.query["updateMask"] == "traffic"
        self.traffic = ask.document["traffic"]
        return {"name": "projects/x/locations/y/operations/1", "done": True}

    @route("GET", "monitoring.googleapis.com", r"/v3/projects/[^/]+/timeSeries")
    def _series(self, ask: Ask) -> Any:
        self.require(ask, "monitoring.timeSeries.list", f"projects/{self.project}")
        return {"timeSeries": []}

    @route("GET", r".*\.run\.app", r"/healthz|/eventlog|/_ah/.*")
    def _front_end(self, ask: Ask) -> Any:
        """Google's front end, which responds before the service does.

        https://docs.cloud.google.com/run/docs/known-issues: reserved URL paths.
        """
        page = f"<title>Error 404 (Not Found)!!1</title>{ask.path} was not found on this server."
        return Reply(page.encode(), 404, {"content-type": "text/html"})

    @route("GET", r".*\.run\.app", r"/livez|/readyz|/health")
    def _health(self, ask: Ask) -> Any:
        self._serving()
        return {"status": "ready"}

    def _serving(self) -> None:
        if self._api() is None:
            raise Refusal(404, "no service")

    @route("GET", r".*\.run\.app", r"/v1/models")
    def _models(self, ask: Ask) -> Any:
        self._serving()
        self._check_key(ask)
        return {"data": []}

    @route("POST", r".*\.run\.app", r"/v1/embeddings")
    def _embed(self, ask: Ask) -> Any:
        self._serving()
        self._check_key(ask)
        model = ask.document["model"]
        self._require_worker(model)
        return {"data": [{"embedding": [1.0] + [0.0] * 383}]}

    def _check_key(self, ask: Ask) -> None:
        key = ask.headers.get("authorization", "").removeprefix("Bearer ")
        document = json.loads(self._versions("penstock-api-keys")[-1])
        if not any(one["id"] in key for one in document["keys"]):
            raise Refusal(401, "the key is not known")

    def _require_worker(self, model: str) -> None:
        """A worker does not start if its image lacks its model's package."""
        for release in self.made("helm_release", f"workloads/{self.region}"):
            if release["name"] != "penstock-workers":
                continue
            if self._has_worker(json.loads(_as_json(release["values"][0])), model):
                return
        raise Refusal(504, f"no worker of {model} answered in time")

    def _has_worker(self, values: dict[str, Any], model: str) -> bool:
        entries = {
            entry["name"]: entry
            for found in values["objects"]
            if found["kind"] == "ConfigMap" and "models.yaml" in found["data"]
            for entry in json.loads(_as_json(found["data"]["models.yaml"]))["models"]
        }
        images = {
            container["image"]
            for found in values["objects"]
            if found["kind"] == "Deployment"
            and not found["metadata"]["name"].endswith(CANARY_SUFFIX)
            for container in found["spec"]["template"]["spec"]["containers"]
            if container["name"] == "worker"
        }
        source = entries[model]["source"] if model in entries else ""
        wanted = source.removeprefix("package:").partition("/")[0].replace("_", "-")
        for image in images:
            packages = self.images.get(image, {}).get("packages", "").split()
            if not source.startswith("package:") or wanted == "models":
                return image in self.images
            if wanted in {one.partition("==")[0] for one in packages}:
                return True
        return False


def _as_json(text: str) -> str:
    return json.dumps(yaml.safe_load(text))
