"""The settings of the functions; the signing key and the public URL of links are those of the API."""

from __future__ import annotations

from typing import Literal

from shared.settings import Settings
from workers.functions.push_auth import GOOGLE_CERTS_URL


class FunctionSettings(Settings):
    """A process that runs functions."""

    push_audience: str = ""
    """What a push's token must be made for; empty: no token is asked for, as on one machine."""
    push_account: str = ""
    """Email of the account that the subscription's tokens are made for."""
    push_checked_by: Literal["us", "cloud-run"] = "us"
    """`cloud-run`: the service lets only the account in, checks signatures itself and passes tokens on without them."""
    push_certs_url: str = GOOGLE_CERTS_URL
    secret: str = ""
    """Signs links to results, as the API does."""
    webhook_secrets: str = ""
    """Of Standard Webhooks (`whsec_…`); two, comma-separated, while the first replaces the second."""
    webhooks_private: bool = False
    """Whether webhooks may go to private addresses, and over http; for one machine."""
