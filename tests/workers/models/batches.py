"""Models that compute whole batches."""

from typing import Any, cast

from workers import tasks
from workers.models.base import InferenceModel


def model_for(*given: Any, **options: Any) -> InferenceModel:
    """Like workers.tasks.model_for, for an entry whose task computes whole batches."""
    model = tasks.model_for(*given, **options)
    assert hasattr(model, "predict")
    return cast(InferenceModel, model)
