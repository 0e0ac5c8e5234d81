"""A stand-in for Google's APIs that rejects everything Google would reject: requests without the
required permission, requests for missing objects, and requests that are not implemented here.

Resources that Terraform creates don't exist until they are in the state in the bucket.
"""

from __future__ import annotations

import json
import pickle
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from tests.infra.release.roles import OWNER, PERMISSIONS

NUMBER = "123456789012"


class Refusal(Exception):
    """An error response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True)
class Ask:
    """A request, with the parts that handlers use."""

    account: str
    verb: str
    host: str
    path: str
    query: dict[str, str]
    body: bytes
    headers: dict[str, str]

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body or b"{}")
        return found


@dataclass(frozen=True)
class Reply:
    """A response that is not JSON, or that has custom headers."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


Handler = Callable[..., Any]
ROUTES: list[tuple[str, str, re.Pattern[str], str]] = []


def route(verb: str, host: str, path: str) -> Callable[[Handler], Handler]:
    """Registers a method for matching requests: groups in `path` become its extra arguments."""

    def added(handler: Handler) -> Handler:
        ROUTES.append((verb, host, re.compile(path), handler.__name__))
        return handler

    return added


@dataclass
class Stored:
    """An object in a bucket."""

    data: bytes
    generation: int


class Api:
    """One project's state.

    Attributes:
        used: the permissions that each account used.
        refused: requests rejected for lack of a permission, as (account, permission, resource).
        unknown: requests that no handler here supports. If a test leaves any, it proves nothing.
        builds: builds requested by `gcloud builds submit` and by the trigger.
    """

    def __init__(self, project: str, owner: str, region: str) -> None:
        self.project = project
        self.region = region
        self.tokens: dict[str, str] = {}
        self.policies: dict[str, dict[str, Any]] = {
            f"projects/{project}": {
                "version": 1,
                "etag": "BwAAAAAAAAA=",
                "bindings": [{"role": OWNER, "members": [f"user:{owner}"]}],
            }
        }
        self.buckets: dict[str, dict[str, Stored]] = {}
        self.topics: set[str] = set()
        self.accounts: set[str] = set()
        self.roles: dict[str, list[str]] = {}
        self.retained: set[str] = set()
        self.secrets: dict[str, list[bytes]] = defaultdict(list)
        self.notes: dict[str, dict[str, Any]] = {}
        self.occurrences: list[dict[str, Any]] = []
        self.images: dict[str, dict[str, Any]] = {}
        self.triggers: dict[str, dict[str, Any]] = {}
        self.builds: list[dict[str, Any]] = []
        self.traffic: list[dict[str, Any]] = []
        self.used: dict[str, set[str]] = defaultdict(set)
        self.refused: list[tuple[str, str, str]] = []
        self.unknown: list[str] = []
        self.asked: list[str] = []
        self._uploads: dict[str, tuple[str, str, bytes]] = {}
        self._generation = 1000
        self._lock = threading.RLock()

    def saved(self) -> bytes:
        """The entire state, for `restore`."""
        return pickle.dumps({name: one for name, one in vars(self).items() if name != "_lock"})

    def restore(self, saved: bytes) -> None:
        """Restores a state returned by `saved`."""
        vars(self).update(pickle.loads(saved))

    def answer(self, ask: Ask) -> Reply:
        """Responds to a request as the API would."""
        with self._lock:
            self.asked.append(f"{ask.account} {ask.verb} {ask.host}{ask.path}")
            try:
                found = self._dispatch(ask)
            except Refusal as refusal:
                return _json(
                    {
                        "error": {
                            "code": refusal.status,
                            "message": refusal.message,
                            "status": _STATUS.get(refusal.status, "UNKNOWN"),
                        }
                    },
                    refusal.status,
                )
            return found if isinstance(found, Reply) else _json(found)

    def _dispatch(self, ask: Ask) -> Any:
        for verb, host, path, name in ROUTES:
            match = path.fullmatch(ask.path)
            if match and verb == ask.verb and re.fullmatch(host, ask.host):
                return getattr(self, name)(ask, *(unquote(group) for group in match.groups()))
        self.unknown.append(f"{ask.verb} {ask.host}{ask.path}")
        raise Refusal(501, f"{ask.verb} {ask.host}{ask.path} is not known here")

    def require(self, ask: Ask, permission: str, resource: str) -> None:
        """Rejects an account that has no role with this permission, either on the resource or on
        the project.
        """
        project = f"projects/{self.project}"
        if ask.headers.get("x-goog-user-project") and permission != "serviceusage.services.use":
            self.require(ask, "serviceusage.services.use", project)
        for place in {resource, project}:
            for binding in self.policies.get(place, {}).get("bindings", []):
                if any(member.endswith(f":{ask.account}") for member in binding["members"]):
                    role = binding["role"]
                    if role == OWNER or permission in self.permissions_of(role):
                        self.used[ask.account].add(permission)
                        return
        self.refused.append((ask.account, permission, resource))
        raise Refusal(403, f"{ask.account} does not have {permission} access to {resource}.")

    def permissions_of(self, role: str) -> set[str]:
        """Returns a role's permissions, as defined by Google or by the project itself."""
        return set(self.roles.get(role, ())) | PERMISSIONS.get(role, set())

    def roles_of(self, account: str) -> dict[str, set[str]]:
        """An account's roles, by the resource they are granted on."""
        found: dict[str, set[str]] = defaultdict(set)
        for place, policy in self.policies.items():
            for binding in policy.get("bindings", []):
                if f"serviceAccount:{account}" in binding["members"]:
                    found[place].add(binding["role"])
        return found

    def _policy(self, place: str) -> dict[str, Any]:
        return self.policies.setdefault(
            place, {"version": 1, "etag": "BwAAAAAAAAA=", "bindings": []}
        )

    def _set_policy(self, place: str, policy: dict[str, Any]) -> dict[str, Any]:
        for binding in policy.get("bindings", []):
            for member in binding["members"]:
                kind, _, name = member.partition(":")
                if kind == "serviceAccount" and name not in self.accounts:
                    raise Refusal(400, f"Service account {name} does not exist.")
        self.policies[place] = policy
        return policy

    @route("POST", "cloudresourcemanager.googleapis.com", r"/v1/projects/([^/:]+):getIamPolicy")
    def _get_project_policy(self, ask: Ask, project: str) -> Any:
        self.require(ask, "resourcemanager.projects.getIamPolicy", f"projects/{project}")
        return self._policy(f"projects/{project}")

    @route("POST", "cloudresourcemanager.googleapis.com", r"/v1/projects/([^/:]+):setIamPolicy")
    def _set_project_policy(self, ask: Ask, project: str) -> Any:
        self.require(ask, "resourcemanager.projects.setIamPolicy", f"projects/{project}")
        return self._set_policy(f"projects/{project}", ask.document["policy"])

    @route("GET", "cloudresourcemanager.googleapis.com", r"/v[13]/projects/([^/:]+)")
    def _get_project(self, ask: Ask, project: str) -> Any:
        self.require(ask, "resourcemanager.projects.get", f"projects/{project}")
        return {"projectId": project, "projectNumber": NUMBER, "lifecycleState": "ACTIVE"}

    @route(
        "POST",
        "serviceusage.googleapis.com",
        r"/v1/projects/[^/]+/services(?:/[^/]+:enable|:batchEnable)",
    )
    def _enable(self, ask: Ask) -> Any:
        self.require(ask, "serviceusage.services.enable", f"projects/{self.project}")
        return {"name": "operations/acat.p2-1", "done": True, "response": {}}

    @route("GET", "serviceusage.googleapis.com", r"/v1/(operations/.+)")
    def _enabling(self, ask: Ask, name: str) -> Any:
        return {"name": name, "done": True, "response": {}}

    @route("GET", "iam.googleapis.com", r"/v1/projects/[^/]+/serviceAccounts/([^/:]+)")
    def _get_account(self, ask: Ask, email: str) -> Any:
        self.require(ask, "iam.serviceAccounts.get", f"projects/{self.project}")
        if email not in self.accounts:
            raise Refusal(404, f"Unknown service account {email}")
        return {"email": email, "name": f"projects/{self.project}/serviceAccounts/{email}"}

    @route("POST", "iam.googleapis.com", r"/v1/projects/([^/]+)/serviceAccounts")
    def _create_account(self, ask: Ask, project: str) -> Any:
        self.require(ask, "iam.serviceAccounts.create", f"projects/{project}")
        email = f"{ask.document['accountId']}@{project}.iam.gserviceaccount.com"
        self.accounts.add(email)
        return {"email": email, "name": f"projects/{project}/serviceAccounts/{email}"}

    @route("GET", "iam.googleapis.com", r"/v1/(projects/[^/]+/roles/[^/:]+)")
    def _get_role(self, ask: Ask, name: str) -> Any:
        self.require(ask, "iam.roles.get", f"projects/{self.project}")
        if name not in self.roles:
            raise Refusal(404, f"The role named {name} was not found.")
        return {"name": name, "etag": "BwAAAAAAAAA=", "includedPermissions": self.roles[name]}

    @route("POST", "iam.googleapis.com", r"/v1/(projects/[^/]+)/roles")
    def _create_role(self, ask: Ask, project: str) -> Any:
        self.require(ask, "iam.roles.create", project)
        name = f"{project}/roles/{ask.document['roleId']}"
        self.roles[name] = ask.document["role"]["includedPermissions"]
        return {"name": name, "includedPermissions": self.roles[name]}

    @route("PATCH", "iam.googleapis.com", r"/v1/(projects/[^/]+/roles/[^/:]+)")
    def _update_role(self, ask: Ask, name: str) -> Any:
        self.require(ask, "iam.roles.update", f"projects/{self.project}")
        self.roles[name] = ask.document["includedPermissions"]
        return {"name": name, "includedPermissions": self.roles[name]}

    @route("POST", "iam.googleapis.com", r"/v1/permissions:queryTestablePermissions")
    def _testable(self, ask: Ask) -> Any:
        return {"permissions": []}

    @route("GET", "iamcredentials.googleapis.com", r"/v1/projects/-/serviceAccounts/.*/allowed\w+")
    def _locations(self, ask: Ask) -> Any:
        return {"encodedLocations": "0x0"}

    def made(self, kind: str, state: str = "platform") -> list[dict[str, Any]]:
        """Each resource of type `kind` in the bucket's state, as its attributes."""
        objects = self.buckets.get(f"{self.project}-penstock-state", {})
        stored = objects.get(f"{state}/default.tfstate")
        document = json.loads(stored.data) if stored else {"resources": []}
        return [
            instance["attributes"]
            for resource in document["resources"]
            if resource["type"] == kind and resource["mode"] == "managed"
            for instance in resource["instances"]
        ]


_STATUS = {
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    412: "FAILED_PRECONDITION",
}


def _json(document: Any, status: int = 200) -> Reply:
    return Reply(json.dumps(document).encode(), status, {"content-type": "application/json"})
