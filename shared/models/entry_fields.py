"""Base class and field types for catalog entries."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
FLOW_SOURCE = "flow:"
"""The source specified for flows, which have no files."""
Source = Annotated[str, Field(pattern=r"^(hf:|gs://|local:|package:).+")]
"""The location of weights."""


def hub_repository(source: str) -> str:
    """Returns ORG/NAME in `hf:ORG/NAME` or `hf:ORG/NAME/FILE`. Empty if it's not on the Hub."""
    kind, _, place = source.partition(":")
    return "/".join(place.split("/")[:2]) if kind == "hf" else ""


def check_quoted(noun: str, value: object) -> object:
    """Rejects a value that YAML may have parsed as a number.

    YAML reads 1.10 as 1.1 and 0123 as 83. Only quotes preserve the intended text.

    Raises:
        ValueError: the value is a number.
    """
    if isinstance(value, int | float):
        raise ValueError(f"a {noun} that looks like a number must be quoted")
    return value


def _quote_revision(value: object) -> object:
    return check_quoted("revision", value)


Revision = Annotated[str, Field(pattern=r"^[!-~]{1,200}$"), BeforeValidator(_quote_revision)]
"""Revisions appear in headers and Redis keys, so they must be printable ASCII without spaces."""


class EntryPart(BaseModel):
    """Part of the catalog. It is immutable and rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)
