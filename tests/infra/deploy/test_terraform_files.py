"""Repository files that Terraform reads by a relative path exist."""

from __future__ import annotations

import re
from pathlib import Path

TERRAFORM = Path(__file__).parents[3] / "infra" / "terraform"


def test_files_that_terraform_reads_are_there() -> None:
    """`try(file(…), …)` hides the fact that a file was moved: prices would silently become 0."""
    read = {
        (source.parent / path).resolve()
        for source in TERRAFORM.rglob("*.tf")
        for path in re.findall(r'\$\{path\.module\}/(\.\./[\w./-]+\.\w+)"', source.read_text())
    }
    assert read, "Terraform reads the list of prices"
    assert {str(path) for path in read if not path.exists()} == set()


def resources(kind: str) -> dict[str, str]:
    """Resource bodies of this type, keyed by file and name."""
    return {
        f"{source.relative_to(TERRAFORM)}: {name}": body
        for source in TERRAFORM.rglob("*.tf")
        for name, body in re.findall(
            rf'^resource "{kind}" "(\w+)" {{\n(.*?)^}}',
            source.read_text(),
            re.MULTILINE | re.DOTALL,
        )
    }


def test_every_topic_keeps_its_messages_in_the_regions() -> None:
    topics = resources("google_pubsub_topic")
    assert len(topics) >= 5
    free = [name for name, body in topics.items() if "message_storage_policy" not in body]
    assert free == []


def test_rights_to_a_filtered_subscription_are_made_again_with_it() -> None:
    """Otherwise the next plan sees no change, and workers are denied access until the plan after
    it.
    """
    filtered = {
        name.partition(": ")[2]
        for name, body in resources("google_pubsub_subscription").items()
        if re.search(r"^  filter +=", body, re.MULTILINE)
    }
    assert filtered == {"workers", "batch", "slots"}
    for name, body in resources("google_pubsub_subscription_iam_member").items():
        (subscription,) = re.findall(r"subscription += google_pubsub_subscription\.(\w+)", body)
        followed = re.findall(
            r"replace_triggered_by = \[google_pubsub_subscription\.(\w+).*\.filter\]", body
        )
        assert followed == ([subscription] if subscription in filtered else []), name


def test_images_expire_though_each_build_tags_them() -> None:
    (registry,) = resources("google_artifact_registry_repository").values()
    deleted = re.findall(
        r'action = "DELETE"\n\n    condition {\n +tag_state  = "(\w+)"\n +older_than = "(\d+)s"',
        registry,
    )
    assert dict(deleted).keys() == {"UNTAGGED", "ANY"}
    assert int(dict(deleted)["ANY"]) > int(dict(deleted)["UNTAGGED"])
    assert re.search(
        r'action = "KEEP"\n\n    most_recent_versions {\n      keep_count = \d+', registry
    )
