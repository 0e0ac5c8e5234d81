"""Keys and tenants."""

import pytest

from api.errors import Unauthorized
from api.http.auth import ApiKeys
from shared.errors import ConfigurationError


@pytest.mark.parametrize(
    "api_keys",
    [
        "key",
        "=tenant",
        "key=",
        "k=a,k=b",
        "k=a\x00b",
        "k=\udcff",
        "k=" + "t" * 257,
        "k=" + "ü" * 129,
    ],
)
def test_keys_that_are_no_pairs_are_refused(api_keys: str) -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_API_KEYS"):
        ApiKeys(api_keys)


def test_without_keys_all_are_one_tenant() -> None:
    assert ApiKeys("").caller_of(None) == ApiKeys(" , ").caller_of("Bearer x")
    assert ApiKeys("").caller_of(None).tenant == "default"


def test_wrong_key_is_refused() -> None:
    with pytest.raises(Unauthorized):
        ApiKeys("k=t").caller_of("Bearer kk")
