"""Warnings are errors, except for warnings in other people's code that we can do nothing about."""

import warnings
from contextlib import nullcontext

import pytest


@pytest.mark.parametrize(
    ("module", "category", "is_error"),
    [
        ("torch._dynamo.guards", DeprecationWarning, False),
        ("torch.fx._symbolic_trace", DeprecationWarning, False),
        ("torch._dynamo.guards", UserWarning, True),
        ("torch.nn.functional", DeprecationWarning, True),
        ("torch.fxx.graph", DeprecationWarning, True),
        ("workers.models.image.model", DeprecationWarning, True),
    ],
)
def test_only_deprecations_within_the_compiler_are_no_errors(
    module: str, category: type[Warning], *, is_error: bool
) -> None:
    with pytest.raises(category) if is_error else nullcontext():
        warnings.warn_explicit("is deprecated", category, "a file", 1, module=module)
