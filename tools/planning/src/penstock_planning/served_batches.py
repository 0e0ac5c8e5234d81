"""The batches that workers will use, which depend on the device. The catalog only limits them."""

from __future__ import annotations

from shared.models.catalog import Catalog


def with_served_batches(catalog: Catalog) -> Catalog:
    """Returns the catalog with the batches of devices that were not measured."""
    models = tuple(
        model.model_copy(update={"batch": model.usual_batch}) for model in catalog.models
    )
    return Catalog(models, catalog.flows, catalog.shared_workers)
