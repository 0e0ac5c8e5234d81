"""Pub/Sub and Cloud Build: requests for builds."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from tests.infra.release.api import Api, Ask, Refusal, route


class Delivery(Api):
    """Topics, triggers and builds."""

    @route("GET", "pubsub.googleapis.com", r"/v1/projects/[^/]+/topics/([^/:]+)")
    def _get_topic(self, ask: Ask, topic: str) -> Any:
        self.require(ask, "pubsub.topics.get", f"topics/{topic}")
        if topic not in self.topics:
            raise Refusal(404, f"Resource not found (resource={topic}).")
        return {"name": f"projects/{self.project}/topics/{topic}"}

    @route("PUT", "pubsub.googleapis.com", r"/v1/projects/[^/]+/topics/([^/:]+)")
    def _create_topic(self, ask: Ask, topic: str) -> Any:
        self.require(ask, "pubsub.topics.create", f"topics/{topic}")
        self.topics.add(topic)
        return {"name": f"projects/{self.project}/topics/{topic}"}

    @route("GET", "pubsub.googleapis.com", r"/v1/projects/[^/]+/topics/([^/:]+):getIamPolicy")
    def _get_topic_policy(self, ask: Ask, topic: str) -> Any:
        self.require(ask, "pubsub.topics.getIamPolicy", f"topics/{topic}")
        return self._policy(f"topics/{topic}")

    @route("POST", "pubsub.googleapis.com", r"/v1/projects/[^/]+/topics/([^/:]+):setIamPolicy")
    def _set_topic_policy(self, ask: Ask, topic: str) -> Any:
        self.require(ask, "pubsub.topics.setIamPolicy", f"topics/{topic}")
        return self._set_policy(f"topics/{topic}", ask.document["policy"])

    @route("POST", "pubsub.googleapis.com", r"/v1/projects/[^/]+/topics/([^/:]+):publish")
    def _publish(self, ask: Ask, topic: str) -> Any:
        self.require(ask, "pubsub.topics.publish", f"topics/{topic}")
        if topic not in self.topics:
            raise Refusal(404, f"Resource not found (resource={topic}).")
        for message in ask.document["messages"]:
            sent = json.loads(base64.b64decode(message["data"]))
            self._trigger(topic, sent)
        return {"messageIds": [str(number) for number, _ in enumerate(ask.document["messages"])]}

    def _trigger(self, topic: str, sent: dict[str, Any]) -> None:
        for trigger in self.triggers.values():
            if trigger["pubsubConfig"]["topic"].rpartition("/")[2] != topic:
                continue
            build = json.loads(json.dumps(trigger["build"]))
            given = build.setdefault("substitutions", {}) | trigger["substitutions"]
            for name, value in given.items():
                if found := re.fullmatch(r"\$\(body\.message\.data\.(\w+)\)", value):
                    given[name] = sent[found[1]]
            build["substitutions"] = given
            build["serviceAccount"] = trigger["serviceAccount"]
            # A triggered build has no source: the workspace is empty.
            build["source"] = None
            needs_approval = trigger.get("approvalConfig", {}).get("approvalRequired", False)
            build["status"] = "PENDING" if needs_approval else "QUEUED"
            self.builds.append(build)

    @route(
        "GET", "cloudbuild.googleapis.com", r"/v1/projects/[^/]+/locations/[^/]+/triggers/([^/]+)"
    )
    def _get_trigger(self, ask: Ask, name: str) -> Any:
        self.require(ask, "cloudbuild.builds.get", f"projects/{self.project}")
        if name not in self.triggers:
            raise Refusal(404, "Requested entity was not found.")
        return self.triggers[name]

    @route("POST", "cloudbuild.googleapis.com", r"/v1/projects/[^/]+/locations/[^/]+/triggers")
    def _create_trigger(self, ask: Ask) -> Any:
        self.require(ask, "cloudbuild.builds.create", f"projects/{self.project}")
        trigger = ask.document
        self.triggers[trigger["name"]] = trigger
        return trigger | {"id": "00000000-0000-0000-0000-000000000001"}

    @route(
        "PATCH", "cloudbuild.googleapis.com", r"/v1/projects/[^/]+/locations/[^/]+/triggers/([^/]+)"
    )
    def _change_trigger(self, ask: Ask, name: str) -> Any:
        self.require(ask, "cloudbuild.builds.update", f"projects/{self.project}")
        self.triggers[name] = ask.document
        return ask.document | {"id": "00000000-0000-0000-0000-000000000001"}

    @route("POST", "cloudbuild.googleapis.com", r"/v1/projects/([^/]+)/locations/([^/]+)/builds")
    def _create_build(self, ask: Ask, project: str, region: str) -> Any:
        self.require(ask, "cloudbuild.builds.create", f"projects/{project}")
        number = len(self.builds) + 1
        shown = {
            "id": f"{number:08d}-0000-4000-8000-000000000000",
            "name": f"projects/{project}/locations/{region}/builds/{number}",
            "projectId": project,
            "status": "SUCCESS",
            "createTime": "2026-01-01T00:00:00Z",
            "logUrl": "https://console.cloud.google.com/cloud-build/builds/1",
        }
        build = ask.document | shown
        self.builds.append(build)
        return {
            "name": f"operations/build/{project}/1",
            "metadata": {
                "@type": "type.googleapis.com/google.devtools.cloudbuild.v1.BuildOperationMetadata",
                "build": build,
            },
        }

    @route("GET", "cloudbuild.googleapis.com", r"/v1/projects/[^/]+/locations/[^/]+/builds/([^/]+)")
    def _get_build(self, ask: Ask, name: str) -> Any:
        self.require(ask, "cloudbuild.builds.get", f"projects/{self.project}")
        return next(build for build in self.builds if build.get("id") == name)

    @route(
        "GET",
        "cloudbuild.googleapis.com",
        r"/v1/projects/[^/]+/locations/[^/]+/defaultServiceAccount",
    )
    def _default_account(self, ask: Ask) -> Any:
        return {"serviceAccountEmail": f"projects/{self.project}/serviceAccounts/none"}
