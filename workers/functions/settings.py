"""The functions' settings.

The signing key and the public URL used in links are the same as for the API.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.settings import ReportSettings
from workers.functions.push_auth import GOOGLE_CERTS_URL


class FunctionSettings(ReportSettings):
    """A process that runs functions."""

    push_audience: str = ""
    """The audience of a push's token. Empty: no token is required, as on a single machine."""
    push_account: str = ""
    """Email of the account for which the subscription's tokens are issued."""
    push_checked_by: Literal["us", "cloud-run"] = "us"
    """`cloud-run`: Cloud Run admits only that account, and removes signatures from tokens."""
    push_certs_url: str = GOOGLE_CERTS_URL
    secret: str = ""
    """Signs links to results, just as the API does."""
    webhook_secrets: str = ""
    """Standard Webhooks keys (`whsec_…`). During a rotation: the new and old keys, comma-separated.
    """
    health_host: str = "127.0.0.1"
    health_port: int = Field(8090, ge=0, le=65535)
    """The port on which a process that takes messages from RabbitMQ serves /readyz and /metrics."""
    webhooks_private: bool = False
    """True if webhooks may use private addresses and http, as on a single machine."""
