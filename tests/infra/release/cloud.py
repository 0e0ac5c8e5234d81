"""The complete stand-in for Google's APIs."""

from __future__ import annotations

from tests.infra.release.delivery import Delivery
from tests.infra.release.images import Images
from tests.infra.release.serving import Serving
from tests.infra.release.storage import Storage


class Cloud(Storage, Delivery, Images, Serving):
    """One project, with everything a release needs."""
