"""Artifact Registry, and the services that examine its images."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from tests.infra.release.api import Api, Ask, Refusal, route


class Images(Api):
    """Images, their vulnerabilities and their component lists."""

    @route("PUT", r"[a-z0-9-]+-docker\.pkg\.dev", r"/v2/([^/]+)/([^/]+)/([^/]+)/manifests/([^/]+)")
    def _put_image(self, ask: Ask, project: str, repository: str, image: str, tag: str) -> Any:
        self._repository(ask.host, repository)
        self.require(
            ask, "artifactregistry.repositories.uploadArtifacts", f"repositories/{repository}"
        )
        name = f"{ask.host}/{project}/{repository}/{image}"
        document = ask.document
        if "digest" in document and f"{name}@{document['digest']}" not in self.images:
            raise Refusal(404, f"{name}@{document['digest']}: not found")
        digest = f"sha256:{hashlib.sha256(ask.body).hexdigest()}"
        content = self.images.get(f"{name}@{document.get('digest')}", document)
        digest = document.get("digest", digest)
        self.images[f"{name}@{digest}"] = self.images[f"{name}:{tag}"] = content
        return {"digest": digest}

    @route("GET", r"[a-z0-9-]+-docker\.pkg\.dev", r"/v2/([^/]+)/([^/]+)/([^/]+)/manifests/([^/]+)")
    def _get_image(self, ask: Ask, project: str, repository: str, image: str, tag: str) -> Any:
        self._repository(ask.host, repository)
        self.require(
            ask, "artifactregistry.repositories.downloadArtifacts", f"repositories/{repository}"
        )
        name = f"{ask.host}/{project}/{repository}/{image}"
        mark = "@" if tag.startswith("sha256:") else ":"
        if f"{name}{mark}{tag}" not in self.images:
            raise Refusal(404, f"{name}{mark}{tag}: not found")
        return self.images[f"{name}{mark}{tag}"]

    @route(
        "GET",
        r"artifactregistry\.googleapis\.com",
        r"/v1/projects/([^/]+)/locations/([^/]+)/repositories/([^/]+)",
    )
    def _get_repository(self, ask: Ask, project: str, location: str, name: str) -> Any:
        self.require(ask, "artifactregistry.repositories.get", f"repositories/{name}")
        self._repository(f"{location}-docker.pkg.dev", name)
        path = f"projects/{project}/locations/{location}/repositories/{name}"
        return {"name": path, "format": "DOCKER"}

    @route(
        "GET",
        r"artifactregistry\.googleapis\.com",
        r"/v1/projects/([^/]+)/locations/([^/]+)/repositories/([^/]+)/packages/([^/]+)/versions/([^/]+)",
    )
    def _get_version(
        self, ask: Ask, project: str, location: str, name: str, image: str, digest: str
    ) -> Any:
        self.require(ask, "artifactregistry.versions.get", f"repositories/{name}")
        if f"{location}-docker.pkg.dev/{project}/{name}/{image}@{digest}" not in self.images:
            raise Refusal(404, f"{image}@{digest}: not found")
        place = f"projects/{project}/locations/{location}/repositories/{name}"
        return {"name": f"{place}/packages/{image}/versions/{digest}"}

    def _repository(self, host: str, name: str) -> None:
        for found in self.made("google_artifact_registry_repository"):
            if (f"{found['location']}-docker.pkg.dev", found["repository_id"]) == (host, name):
                return
        raise Refusal(404, f'Repository "{name}" not found')

    @route(
        "POST",
        "ondemandscanning.googleapis.com",
        r"/v1/projects/[^/]+/locations/([^/]+)/scans:analyzePackages",
    )
    def _scan(self, ask: Ask, location: str) -> Any:
        self.require(ask, "ondemandscanning.scans.analyzePackages", f"projects/{self.project}")
        return {"scan": f"projects/{self.project}/locations/{location}/scans/1"}

    @route(
        "GET",
        "ondemandscanning.googleapis.com",
        r"/v1/projects/[^/]+/locations/[^/]+/scans/[^/]+/vulnerabilities",
    )
    def _vulnerabilities(self, ask: Ask) -> Any:
        self.require(ask, "ondemandscanning.scans.listVulnerabilities", f"projects/{self.project}")
        return {"occurrences": []}

    @route(
        "GET",
        "containeranalysis.googleapis.com",
        r"/v1(?:beta1)?/projects/[^/]+/(?:locations/[^/]+/)?notes/([^/]+)",
    )
    def _get_note(self, ask: Ask, note: str) -> Any:
        self.require(ask, "containeranalysis.notes.get", f"projects/{self.project}")
        if note not in self.notes:
            raise Refusal(404, f"note {note} not found")
        return self.notes[note]

    @route(
        "POST",
        "containeranalysis.googleapis.com",
        r"/v1(?:beta1)?/projects/[^/]+/(?:locations/[^/]+/)?notes",
    )
    def _create_note(self, ask: Ask) -> Any:
        self.require(ask, "containeranalysis.notes.create", f"projects/{self.project}")
        note = ask.query["noteId"]
        self.notes[note] = ask.document | {"name": f"projects/{self.project}/notes/{note}"}
        return self.notes[note]

    @route(
        "GET",
        "containeranalysis.googleapis.com",
        r"/v1(?:beta1)?/projects/[^/]+/(?:locations/[^/]+/)?occurrences",
    )
    def _list_occurrences(self, ask: Ask) -> Any:
        self.require(ask, "containeranalysis.occurrences.list", f"projects/{self.project}")
        wanted = re.search(r'resource_?[uU]r[il]="([^"]+)"', ask.query.get("filter", ""))
        return {
            "occurrences": [
                one for one in self.occurrences if wanted and one["resourceUri"] == wanted[1]
            ]
        }

    @route(
        "POST",
        "containeranalysis.googleapis.com",
        r"/v1(?:beta1)?/projects/[^/]+/(?:locations/[^/]+/)?occurrences",
    )
    def _create_occurrence(self, ask: Ask) -> Any:
        self.require(ask, "containeranalysis.occurrences.create", f"projects/{self.project}")
        self.require(ask, "containeranalysis.notes.attachOccurrence", f"projects/{self.project}")
        number = len(self.occurrences)
        made = ask.document | {"name": f"projects/{self.project}/occurrences/{number}"}
        self.occurrences.append(made)
        return made
