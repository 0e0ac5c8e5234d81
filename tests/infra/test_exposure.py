"""An API that others can reach requires keys, regardless of other settings."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from api.http.auth import access_of
from infra.local.up import PLAIN, secure_settings
from shared.errors import Unavailable
from shared.settings import ApiSettings
from tests.keys import keys_url
from tests.limits import WAIT_LIMIT_S

OUTSIDE = {"PENSTOCK_HOST": "0.0.0.0"}
ROOT = Path(__file__).parents[2]


def tenant_of(settings: dict[str, str], key: str) -> str:
    """The tenant whose key the API accepts."""
    access = access_of(ApiSettings(keys_url=settings["PENSTOCK_KEYS_URL"]))
    return access.caller_of([(b"authorization", f"Bearer {key}".encode())]).tenant


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_nothing_is_needed_on_loopback(tmp_path: Path, host: str) -> None:
    said: list[str] = []
    given = {"PENSTOCK_HOST": host}
    assert secure_settings(tmp_path, given, said.append, may_show_key=True) == given
    assert secure_settings(tmp_path, {}, said.append, may_show_key=True) == {}
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_first_start_makes_a_key_and_shows_it_once(tmp_path: Path) -> None:
    said: list[str] = []
    settings = secure_settings(tmp_path / "var", OUTSIDE, said.append, may_show_key=True)
    (key,) = re.findall(r"pk_live_\w+", "\n".join(said))
    assert tenant_of(settings, key) == "default"
    assert key not in (tmp_path / "var/keys.json").read_text()
    said.clear()
    assert settings == secure_settings(tmp_path / "var", OUTSIDE, said.append, may_show_key=True)
    assert said == [PLAIN]
    assert tenant_of(settings, key) == "default"


def test_key_does_not_go_into_logs(tmp_path: Path) -> None:
    said: list[str] = []
    settings = secure_settings(tmp_path, OUTSIDE, said.append, may_show_key=False)
    assert "pk_live_" not in "\n".join(said)
    given, *command = said[-1].split()
    name, _, url = given.partition("=")
    assert (name, url) == ("PENSTOCK_KEYS_URL", settings["PENSTOCK_KEYS_URL"])
    reported = subprocess.run(
        [sys.executable, "-m", "infra.cli.main", *command[1:]],
        env=os.environ | {name: url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=True,
    )
    assert tenant_of(settings, reported.stdout.strip()) == "default"


def test_given_keys_and_webhooks_are_kept(tmp_path: Path) -> None:
    own = {"PENSTOCK_KEYS_URL": keys_url(tmp_path), "PENSTOCK_WEBHOOKS_PRIVATE": "1"}
    settings = secure_settings(
        tmp_path / "var", OUTSIDE | own, lambda line: None, may_show_key=True
    )
    assert settings == OUTSIDE | own
    assert not (tmp_path / "var").exists()


def test_webhooks_go_to_public_addresses_only(tmp_path: Path) -> None:
    settings = secure_settings(tmp_path, OUTSIDE, lambda line: None, may_show_key=True)
    assert settings["PENSTOCK_WEBHOOKS_PRIVATE"] == "0"


def test_tls_silences_the_warning(tmp_path: Path) -> None:
    said: list[str] = []
    secure_settings(tmp_path, OUTSIDE | {"PENSTOCK_TLS_CERT": "/c"}, said.append, may_show_key=True)
    assert PLAIN not in said


def test_directory_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "keys.json").mkdir()
    with pytest.raises(Unavailable, match=r"keys\.json: Is a directory"):
        secure_settings(tmp_path, OUTSIDE, lambda line: None, may_show_key=True)
