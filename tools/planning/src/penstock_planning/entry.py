"""Entries in plan and scenario files.

Unknown keys and infinite numbers are rejected.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from shared.errors import ConfigurationError

_UNKNOWN = "unknown_key"


class Entry(BaseModel):
    """Part of such a file. A misspelled key is rejected with a list of accepted keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def list_keys(cls) -> frozenset[str]:
        """Returns the keys that an entry may have. Keys without a field need `extra="allow"`."""
        return frozenset(cls.model_fields)

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, entry: object) -> object:
        accepted = sorted(cls.list_keys())
        for key in entry if isinstance(entry, dict) else ():
            if key not in accepted:
                context = {"key": str(key), "accepted": ", ".join(accepted)}
                raise PydanticCustomError(
                    _UNKNOWN, "unknown field; accepted here: {accepted}", context
                )
        return entry


def to_configuration_error(error: ValidationError, where: str) -> ConfigurationError:
    """Converts the first validation error into a ConfigurationError that names the field.

    Args:
        where: the file or option that the entry was read from.
    """
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == _UNKNOWN:
        place.append(first["ctx"]["key"])
    field = ".".join(place) or "file"
    reason = first["msg"].removeprefix("Value error, ")
    return ConfigurationError(f"{where}: {field}: {reason}", field=field)
