"""Keys and tenants."""

import pytest

from api.errors import Unauthorized
from api.http.auth import Tenants
from shared.errors import ConfigurationError


@pytest.mark.parametrize(
    "api_keys", ["key", "=tenant", "key=", "k=a,k=b", "k=a\x00b", "k=\udcff", "k=" + "t" * 257, "k=" + "ü" * 129]
)
def test_keys_that_are_no_pairs_are_refused(api_keys: str) -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_API_KEYS"):
        Tenants(api_keys)


def test_without_keys_all_are_one_tenant() -> None:
    assert Tenants("").tenant_of(None) == Tenants(" , ").tenant_of("Bearer x") == "default"


def test_wrong_key_is_refused() -> None:
    with pytest.raises(Unauthorized):
        Tenants("k=t").tenant_of("Bearer kk")
