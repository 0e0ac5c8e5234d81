"""Environment variables that a catalog entry sets for its class, as plain values and secrets.

An entry contains a reference to each secret, never the secret itself. Only the class's worker reads
the secret, and only the class's process receives it.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, NamedTuple, Self

from pydantic import AfterValidator, Field

MAX_VARIABLES = 64
MAX_VALUE_CHARS = 4096
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
OURS = "PENSTOCK_"
"""Prefix of Penstock's settings, which are not passed to classes."""
_REFERENCES = {
    "local": re.compile(r"local:(?P<path>[/~][^\0]+)"),
    "kubernetes": re.compile(
        r"kubernetes:(?P<secret>[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?)"
        r"/(?P<key>[A-Za-z0-9._-]{1,253})"
    ),
    "google": re.compile(
        r"google:(?P<version>projects/(?P<project>[a-z0-9:.-]+)/secrets/(?P<secret>[A-Za-z0-9_-]+)"
        r"/versions/(?:latest|[1-9][0-9]*))"
    ),
}


class SecretReference(NamedTuple):
    """A secret's location.

    Attributes:
        kind: `local`, `kubernetes`, or `google`.
        parts: `path` for a local file; `secret` and `key` in Kubernetes; `version`, the full name
            of a version in Secret Manager, with its `project` and `secret`.
    """

    kind: str
    parts: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a secret reference from an entry.

        Raises:
            ValueError: the text does not match any of the formats.
        """
        for kind, form in _REFERENCES.items():
            if match := form.fullmatch(text):
                return cls(kind, match.groupdict())
        # The error omits the text, because it may be the secret itself.
        raise ValueError(
            "a secret must be a reference: local:/PATH, kubernetes:SECRET/KEY or "
            "google:projects/PROJECT/secrets/SECRET/versions/VERSION"
        )

    @property
    def variable(self) -> str:
        """The variable through which the manifests pass a Kubernetes secret to the worker."""
        place = f"{self.parts['secret']}/{self.parts['key']}"
        digest = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
        return f"{OURS}CLASS_SECRET_{digest.upper()}"


def check_name(name: str) -> str:
    """Returns the name if it is a valid variable name.

    Raises:
        ValueError: the name is invalid, or is one of our settings.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            "a variable name must be 1 to 128 letters, digits and underscores, and must not "
            "start with a digit"
        )
    if name.startswith(OURS):
        raise ValueError(
            f"{OURS}* is reserved for Penstock settings, which are not passed to classes"
        )
    return name


def _without_null(value: str) -> str:
    if "\0" in value:
        raise ValueError("a variable's value must not contain null characters")
    return value


def _is_reference(text: str) -> str:
    SecretReference.parse(text)
    return text


VariableName = Annotated[str, AfterValidator(check_name)]
PlainVariables = Annotated[
    dict[
        VariableName,
        Annotated[str, Field(max_length=MAX_VALUE_CHARS), AfterValidator(_without_null)],
    ],
    Field(max_length=MAX_VARIABLES),
]
SecretVariables = Annotated[
    dict[VariableName, Annotated[str, AfterValidator(_is_reference)]],
    Field(max_length=MAX_VARIABLES),
]
