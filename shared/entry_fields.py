"""What the parts of the catalog's entries are made of: their base class and types of fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
FLOW_SOURCE = "flow:"
"""The source of a flow, which no file has."""
Source = Annotated[str, Field(pattern=rf"^(hf:|gs://|local:|package:|{FLOW_SOURCE}).+")]
"""Where weights are."""


def quoted(noun: str, value: object) -> object:
    """Returns a value that YAML may have read as a number.

    YAML reads 1.10 as 1.1 and 0123 as 83: only quotes keep what was meant.

    Raises:
        ValueError: it is a number.
    """
    if isinstance(value, int | float):
        raise ValueError(f"a {noun} that looks like a number needs quotes")
    return value


def _quoted_revision(value: object) -> object:
    return quoted("revision", value)


Revision = Annotated[str, Field(pattern=r"^[!-~]{1,200}$"), BeforeValidator(_quoted_revision)]
"""Headers and keys in Redis have revisions, so they are of printable ASCII without spaces."""


class EntryPart(BaseModel):
    """A part of the catalog. It has no fields but its own, and does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
