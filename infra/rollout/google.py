"""The part of Google's REST APIs that a rollout needs, with time limits and Penstock errors."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import google.auth
from google.auth.credentials import Credentials
from google.auth.exceptions import GoogleAuthError
from google.auth.transport.requests import AuthorizedSession

from shared.errors import ConfigurationError, Unavailable

ENDPOINTS = {
    "run": "https://run.googleapis.com",
    "monitoring": "https://monitoring.googleapis.com",
    "secretmanager": "https://secretmanager.googleapis.com",
}
CALL_LIMIT_S = 30
SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]


def default_credentials() -> Credentials:
    """Returns the credentials of the account running this process.

    Raises:
        ConfigurationError: no credentials were found.
    """
    try:
        credentials, _ = google.auth.default(scopes=SCOPES)
    except GoogleAuthError as error:
        raise ConfigurationError(f"no Google credentials found: {error}") from error
    return credentials


class GoogleClient:
    """Calls Google's APIs.

    Args:
        endpoints: URL of each API, keyed by name.
    """

    def __init__(self, credentials: Credentials, endpoints: Mapping[str, str] = ENDPOINTS) -> None:
        self._credentials = credentials
        self._endpoints = endpoints

    def get(
        self,
        api: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        missing_ok: bool = False,
    ) -> dict[str, Any] | None:
        """Returns the resource at `path`, or None if it doesn't exist and is allowed to be missing.

        Raises:
            Unavailable: there was no response, or the response was an error, which the message
                quotes.
        """
        return self._ask("GET", api, path, missing_ok=missing_ok, params=query)

    def patch(self, api: str, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Changes the resource. Returns the operation. Raises the same errors as `get`."""
        return self._ask("PATCH", api, path, json=body) or {}

    def await_done(
        self, api: str, operation: Mapping[str, Any], limit_s: float, pause: Callable[[float], None]
    ) -> None:
        """Waits until a long-running operation has succeeded.

        Raises:
            Unavailable: it failed or did not finish in time.
        """
        state: Mapping[str, Any] = operation
        for _ in range(max(1, int(limit_s / 2))):
            if state.get("done"):
                break
            pause(2)
            state = self.get(api, f"v2/{operation['name']}") or {}
        if "error" in state:
            raise Unavailable(f"{operation['name']}: {state['error'].get('message', 'failed')}")
        if not state.get("done"):
            raise Unavailable(f"{operation['name']} did not finish within {limit_s:g} s")

    def secret(self, project: str, name: str) -> str:
        """Returns the latest version of a secret. Raises the same errors as `get`."""
        path = f"v1/projects/{project}/secrets/{name}/versions/latest:access"
        version = self.get("secretmanager", path) or {}
        try:
            return base64.b64decode(version["payload"]["data"]).decode()
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"secret {name}: not a text: {error!r}") from error

    def _ask(
        self, verb: str, api: str, path: str, *, missing_ok: bool = False, **options: Any
    ) -> dict[str, Any] | None:
        url = f"{self._endpoints[api]}/{path}"
        try:
            # Opens a new connection for each call, because calls are minutes apart.
            with AuthorizedSession(self._credentials) as session:
                answer = session.request(verb, url, timeout=CALL_LIMIT_S, **options)
        except (OSError, GoogleAuthError) as error:  # request errors are OSErrors
            raise Unavailable(f"{verb} {url}: {error}") from error
        if answer.status_code == 404 and missing_ok:
            return None
        if answer.status_code != 200:
            raise Unavailable(f"{verb} {url}: {answer.status_code} {answer.text[:500]}")
        try:
            document: dict[str, Any] = answer.json()
        except ValueError as error:
            raise Unavailable(f"{verb} {url}: the response is not JSON: {error}") from error
        return document
