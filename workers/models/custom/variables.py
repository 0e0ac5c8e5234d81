"""A class's environment variables, from the operator, its cog.yaml, and its catalog entry.

Secrets are read here when the class's process starts. They exist only in the process's environment,
and are removed from the class's output and errors (workers/models/custom/process.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError

from shared.errors import ConfigurationError, ModelFailed, PenstockError
from shared.models.catalog_file import LOCAL
from shared.models.class_variables import PlainVariables, SecretReference, SecretVariables
from shared.settings import ClassSettings, read_settings
from workers.models.custom.sources import read_sources

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

GOOGLE_URL = "https://secretmanager.googleapis.com"
GOOGLE_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
GOOGLE_LIMIT_S = 30.0
MAX_SECRET_BYTES = 64 * 1024
"""Secret Manager's limit (https://cloud.google.com/secret-manager/quotas)."""


class EntryVariables(NamedTuple):
    """Settings for a class's process in its catalog entry."""

    environment: Mapping[str, str] = MappingProxyType({})
    secrets: Mapping[str, str] = MappingProxyType({})
    """Secret references, keyed by variable name."""
    processes: int | None = None


class ClassVariables(NamedTuple):
    """A process's variables, and the values that must not be shown."""

    environment: dict[str, str]
    hidden: tuple[str, ...]


def variables_of(
    folder: Path, entry: EntryVariables, left_out: list[str] | None = None
) -> ClassVariables:
    """Returns a class's variables.

    Later sources take precedence: operator, cog.yaml, the entry, its secrets.

    Args:
        left_out: receives the reason for each secret that can't be read. If None, an error is
            raised instead.

    Raises:
        ConfigurationError: a secret is missing, or cog.yaml is invalid.
        ModelFailed: Secret Manager is unreachable. A later attempt may succeed.
    """
    names = read_settings(ClassSettings).class_variable_names
    passed_on = {name: os.environ[name] for name in names if name in os.environ}
    secrets = {}
    for name, reference in entry.secrets.items():
        try:
            secrets[name] = _read(name, reference)
        except PenstockError as error:
            if left_out is None:
                raise
            left_out.append(f"{error.message}; the class ran without this variable")
    environment = {
        **passed_on,
        **read_sources(folder).environment,
        **entry.environment,
        **secrets,
    }
    return ClassVariables(environment, tuple(dict.fromkeys(secrets.values())))


def entry_variables(folder: Path) -> EntryVariables:
    """Returns a local class's variables from the catalog, for commands that run it without a stack.

    Empty if the catalog has no entry with this folder as its `local:` source.

    Raises:
        ConfigurationError: the entry's `environment` or `secrets` are invalid.
    """
    models_file = read_settings(ClassSettings).models_file
    try:
        document: Any = yaml.safe_load(models_file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError):
        return EntryVariables()
    entries = document.get("models") if isinstance(document, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        source = entry.get("source") if isinstance(entry, dict) else None
        if not isinstance(source, str) or not source.startswith(LOCAL):
            continue
        if _is_folder(source.removeprefix(LOCAL), folder):
            return _check_entry(models_file, entry)
    return EntryVariables()


def _is_folder(path: str, folder: Path) -> bool:
    try:
        # Unlike Path's method, this one accepts a user who doesn't exist.
        return os.path.realpath(os.path.expanduser(path)) == str(folder.resolve())
    except ValueError:  # the path contains a null character
        return False


def _check_entry(models_file: Path, entry: Mapping[str, Any]) -> EntryVariables:
    variables = {}
    for name, kind in (("environment", PlainVariables), ("secrets", SecretVariables)):
        try:
            variables[name] = TypeAdapter(kind).validate_python(entry.get(name, {}))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (name, *first["loc"])))
            raise ConfigurationError(
                f"{models_file}: {where}: {first['msg']}", field=name
            ) from None  # the class's input may contain a secret
    processes = entry.get("processes")
    return EntryVariables(
        variables["environment"],
        variables["secrets"],
        processes if isinstance(processes, int) else None,
    )


def _read(name: str, text: str) -> str:
    """Returns a secret's value, without its final newline.

    Raises:
        ConfigurationError: the secret is missing. The message contains the secret's location but
            never its value.
        ModelFailed: Secret Manager is unreachable.
    """
    reference = SecretReference.parse(text)
    where = f"secrets.{name}: {text}"
    if reference.kind == "kubernetes":
        value = os.environ.get(reference.variable)
        if value is None:
            raise ConfigurationError(
                f"{where}: not available on this worker; render its manifests again",
                field="secrets",
            )
        data = value.encode(errors="surrogateescape")
    elif reference.kind == "google":
        data = read_google_secret(reference.parts["version"], where)
    else:
        try:
            with Path(os.path.expanduser(reference.parts["path"])).open("rb") as file:
                data = file.read(MAX_SECRET_BYTES + 1)
        except OSError as error:
            raise ConfigurationError(f"{where}: {error.strerror}", field="secrets") from error
    return _text(where, data)


def _text(where: str, data: bytes) -> str:
    if len(data) > MAX_SECRET_BYTES:
        raise ConfigurationError(f"{where}: exceeds {MAX_SECRET_BYTES} bytes", field="secrets")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigurationError(f"{where}: not valid UTF-8", field="secrets") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text or "\0" in text:
        reason = "must not contain a null character" if text else "is empty"
        raise ConfigurationError(f"{where}: {reason}", field="secrets")
    return text


def read_google_secret(
    version: str, where: str, url: str = GOOGLE_URL, credentials: Credentials | None = None
) -> bytes:
    """Reads a version from Secret Manager.

    See https://cloud.google.com/secret-manager/docs/reference/rest/v1/projects.secrets.versions/access.

    Args:
        where: the field that names the secret, for errors.
        credentials: None means this process's credentials.

    Raises:
        ConfigurationError: the secret is missing, or this process may not read it.
        ModelFailed: Secret Manager is unreachable. A later attempt may succeed.
    """
    import base64

    import google.auth
    import google.auth.exceptions
    import requests
    from google.auth.transport.requests import AuthorizedSession

    try:
        if credentials is None:
            credentials, _ = google.auth.default(scopes=[GOOGLE_SCOPE])
        with AuthorizedSession(credentials) as session:
            answer = session.get(f"{url}/v1/{version}:access", timeout=GOOGLE_LIMIT_S)
            status = answer.status_code
            if status == requests.codes.ok:
                return base64.b64decode(answer.json()["payload"]["data"])
    except google.auth.exceptions.DefaultCredentialsError as error:
        raise ConfigurationError(
            f"{where}: no Google credentials found on this worker", field="secrets"
        ) from error
    except (google.auth.exceptions.GoogleAuthError, requests.RequestException) as error:
        reason = type(error).__name__
        raise ModelFailed(f"{where}: Secret Manager is unreachable: {reason}") from error
    except (ValueError, LookupError, TypeError):
        raise ModelFailed(f"{where}: Secret Manager returned an invalid response") from None
    if status in (requests.codes.forbidden, requests.codes.not_found, requests.codes.bad_request):
        raise ConfigurationError(
            f"{where}: Secret Manager returned {status}: the version does not exist, or the "
            "worker's account may not read it (roles/secretmanager.secretAccessor)",
            field="secrets",
        )
    raise ModelFailed(f"{where}: Secret Manager returned {status}")
