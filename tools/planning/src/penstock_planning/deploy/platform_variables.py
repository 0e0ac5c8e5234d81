"""The variables in infra/terraform/platform that affect sizing, with Terraform's defaults.

Files use the `terraform apply -var-file` format, so the plan matches what is applied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

import infra
from infra.kubernetes.deployment import GpuReservation
from penstock_planning.entry import Entry, to_configuration_error
from shared.errors import ConfigurationError
from shared.models.entry import GpuTypeName

MAX_REPLY_SUBSCRIPTIONS = 9000
"""Maximum number of reply subscriptions, out of the 10,000 a project can have. Terraform has the
same limit.
"""
MAX_REGIONS = 16
INBOX_STRIDE = 1000
"""A region's inboxes are numbered starting at this value times the region's index, as in Terraform.
"""
MEMORY = r"^[0-9]+(\.[0-9]+)?(Gi|Mi)$"
INSTANCES_TO_INBOXES = 2
"""The API's old and new revisions lease inboxes at the same time."""
_TERRAFORM = Path(infra.__file__).parent / "terraform"
VARIABLES_FILE = _TERRAFORM / "platform" / "variables.tf"
OPTIONS_FILE = _TERRAFORM / "modules" / "options" / "variables.tf"
"""Types and defaults of the variables that are objects."""


class _Variable(Entry):
    # Variables that do not affect the size are kept, so that the plan's variables can be applied as
    # they are.
    model_config = ConfigDict(extra="allow", frozen=True)
    VARIABLE: ClassVar[str] = ""
    """The name of the Terraform variable whose attributes are accepted. If empty, only the class's
    fields are accepted.
    """

    @classmethod
    def list_keys(cls) -> frozenset[str]:
        return read_options(cls.VARIABLE) if cls.VARIABLE else super().list_keys()


@cache
def read_variables() -> frozenset[str]:
    """Reads the names of the stage's variables."""
    return frozenset(re.findall(r'^variable "(\w+)"', VARIABLES_FILE.read_text("utf-8"), re.M))


@cache
def read_options(variable: str) -> frozenset[str]:
    """Reads a variable's option names. The variable is an object or a map of objects."""
    # `terraform fmt` fixes the indentation.
    typed = re.search(
        rf"^    {variable} = optional\((map\()?object\({{\n(?P<options>.*?)^    }}\)",
        OPTIONS_FILE.read_text("utf-8"),
        re.M | re.S,
    )
    assert typed is not None, variable
    return frozenset(re.findall(r"^      (\w+) += ", typed["options"], re.M))


def _gib(memory: str) -> float:
    return float(memory[:-2]) / (1 if memory.endswith("Gi") else 1024)


class ApiVariable(_Variable):
    """Terraform's `api`."""

    VARIABLE: ClassVar = "api"
    concurrency: int = Field(80, ge=1, le=1000)
    cpu: float = Field(2, gt=0)
    max_instances: int = Field(4, ge=1)
    memory: str = Field("1Gi", pattern=MEMORY)
    min_instances: int = Field(1, ge=1)

    @property
    def memory_gib(self) -> float:
        """Memory of one instance's main container."""
        return _gib(self.memory)


class CacheVariable(_Variable):
    """Terraform's `cache`."""

    VARIABLE: ClassVar = "cache"
    node_type: str = "STANDARD_SMALL"
    replicas: int = Field(1, ge=0)


class RecordsVariable(_Variable):
    """Terraform's `records`: a separate Redis if several regions share records."""

    VARIABLE: ClassVar = "records"
    apart: bool | None = None
    node_type: str = "STANDARD_SMALL"
    replicas: int = Field(1, ge=0)


class FunctionsVariable(_Variable):
    """Terraform's `functions`: a function exists if its image is set."""

    VARIABLE: ClassVar = "functions"
    dead_letters: dict[str, Any] | None = None
    reports: dict[str, Any] | None = None
    webhooks: dict[str, Any] | None = None


class Inboxes(_Variable):
    """Terraform's `inboxes`."""

    VARIABLE: ClassVar = "inboxes"
    per_region: int = Field(8, ge=1, le=INBOX_STRIDE)
    slots: int = Field(8, ge=1, le=200)
    kept_slots: int | None = Field(None, ge=1, le=200)

    @property
    def made_slots(self) -> int:
        """Existing slots in each inbox. Slots beyond `slots` belong to outgoing revisions."""
        return self.slots if self.kept_slots is None else self.kept_slots

    @property
    def subscriptions(self) -> int:
        """Number of subscriptions per inbox: its slots, and one for direct replies."""
        return self.made_slots + 1


class BatchesVariable(_Variable):
    """Terraform's `batches`: each runner leases an inbox, like an API instance."""

    VARIABLE: ClassVar = "batches"
    instances: int = Field(0, ge=0)
    memory: str = Field("1Gi", pattern=MEMORY)

    @property
    def memory_gib(self) -> float:
        return _gib(self.memory)


class GeneralNodes(_Variable):
    """Terraform's `nodes.general`. The defaults are in the module `cluster`."""

    machine_type: str = "e2-standard-4"
    max: int = Field(6, ge=1)
    min: int = Field(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, chosen: object) -> object:
        return (
            {name: value for name, value in chosen.items() if value is not None}
            if isinstance(chosen, dict)
            else chosen
        )


class Nodes(_Variable):
    """Terraform's `nodes`."""

    VARIABLE: ClassVar = "nodes"
    compute_classes: bool = False
    general: GeneralNodes = GeneralNodes()
    max_gpus: int = Field(8, ge=1)
    overflow: GpuTypeName | None = None
    spot: bool = True


class RowsVariable(_Variable):
    """Terraform's `rows`: the row archive, a process between the writers' bucket and BigQuery."""

    VARIABLE: ClassVar = "rows"
    archive: bool = True
    every_s: int = Field(120, ge=90, le=3600)
    memory: str = Field("4Gi", pattern=MEMORY)

    @property
    def memory_gib(self) -> float:
        return _gib(self.memory)


class ObjectsDays(_Variable):
    """Terraform's `objects_days`, for the folders that requests fill."""

    VARIABLE: ClassVar = "objects_days"
    inputs: int = Field(8, ge=1)
    results: int = Field(7, ge=1)


class Region(_Variable):
    """One entry of Terraform's `regions`."""

    VARIABLE: ClassVar = "regions"
    index: int = Field(0, ge=0, lt=MAX_REGIONS)
    max_gpus: int | None = Field(None, ge=1)
    overflow: Literal[GpuTypeName, "none"] | None = None
    """Overrides nodes.overflow."""
    reservations: dict[GpuTypeName, GpuReservation] = Field({})
    """Reservations by GPU type. Reservations are used up first."""
    zones: list[str] | None = None


class Platform(_Variable):
    """The variables that affect the size of the `platform` stage."""

    api: ApiVariable = ApiVariable()
    batches: BatchesVariable = BatchesVariable()
    cache: CacheVariable = CacheVariable()
    dataset_location: str = "EU"
    domain: str | None = None
    functions: FunctionsVariable = FunctionsVariable()
    inboxes: Inboxes = Inboxes()
    nodes: Nodes = Nodes()
    objects_days: ObjectsDays = ObjectsDays()
    records: RecordsVariable = RecordsVariable()
    rows: RowsVariable = RowsVariable()
    regions: dict[str, Region] = Field({"europe-west4": Region()}, min_length=1)
    storage_location: str = "EU"

    @classmethod
    def list_keys(cls) -> frozenset[str]:
        return read_variables()

    @model_validator(mode="after")
    def _regions_are_apart(self) -> Self:
        if len({region.index for region in self.regions.values()}) < len(self.regions):
            raise ValueError("every region must have a different index")
        return self

    @property
    def home(self) -> str:
        """The region with the lowest index, which contains every singleton resource."""
        return min(self.regions, key=lambda name: self.regions[name].index)

    def overflow_in(self, region: str) -> str | None:
        """The GPU type used in a region if other types are out of stock, or None."""
        chosen = self.regions[region].overflow or self.nodes.overflow
        return None if chosen == "none" else chosen

    def in_regions(self, names: Sequence[str]) -> Platform:
        """Returns the platform in these regions.

        Known regions keep their settings, and new ones are assigned an index.

        Raises:
            ConfigurationError: there are more than 16 regions, the maximum that the address range
            allows.
        """
        if len(names) > MAX_REGIONS:
            raise ConfigurationError(
                f"--region: must be at most {MAX_REGIONS} regions, got {len(names)}",
                field="regions",
            )
        free = iter(
            sorted(
                set(range(MAX_REGIONS))
                - {self.regions[name].index for name in names if name in self.regions}
            )
        )
        regions = {
            name: self.regions[name] if name in self.regions else Region(index=next(free))
            for name in names
        }
        return self.model_copy(update={"regions": regions})


def read_platform(path: Path | None) -> Platform:
    """Reads the variables in a `.tfvars.json` file.

    Returns Terraform's defaults if there is no file.

    Raises:
        ConfigurationError: the file can't be read, or a variable is invalid.
    """
    if path is None:
        return Platform()
    try:
        return Platform.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except ValidationError as error:  # must come before ValueError, its base class
        raise to_configuration_error(error, str(path)) from error
    except ValueError as error:
        raise ConfigurationError(
            f"{path}: not valid JSON ({error}); variables must be in a .tfvars.json file"
        ) from error
