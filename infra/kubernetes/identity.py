"""Identity of workers outside Google: a Kubernetes token, exchanged for Google's (RFC 8693).

The cluster's API server signs the token and the kubelet keeps it fresh. Google checks it against
the issuer that infra/terraform/platform/outside.tf names. No key is made, copied or kept anywhere.
"""

from __future__ import annotations

import json
from typing import Any

CREDENTIALS_DIR = "/etc/penstock-identity"
CREDENTIALS_FILE = "credentials.json"
TOKEN_DIR = "/var/run/penstock"
TOKEN_VALID_S = 3600
"""The kubelet renews a token when four fifths of this have passed."""


def credentials(audience: str) -> str:
    """The configuration file of google-auth (an "external account"). It holds no secret.

    Args:
        audience: the provider in Google's identity pool, as `//iam.googleapis.com/projects/…`.
    """
    external = {
        "type": "external_account",
        "audience": audience,
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": "https://sts.googleapis.com/v1/token",
        "credential_source": {"file": f"{TOKEN_DIR}/token"},
    }
    return json.dumps(external, indent=2) + "\n"


def identity_settings(project: str) -> dict[str, str]:
    """The variables of google-auth: path of the configuration, and project."""
    return {
        "GOOGLE_APPLICATION_CREDENTIALS": f"{CREDENTIALS_DIR}/{CREDENTIALS_FILE}",
        "GOOGLE_CLOUD_PROJECT": project,
    }


def token_volume(audience: str) -> dict[str, Any]:
    """The pod's volume with the token."""
    token = {"path": "token", "audience": f"https:{audience}", "expirationSeconds": TOKEN_VALID_S}
    return {"name": "token", "projected": {"sources": [{"serviceAccountToken": token}]}}
