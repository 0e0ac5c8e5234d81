"""The permissions in Google's predefined roles that a release needs: for each role, the permissions
that the stand-in for Google's APIs checks.

Source: https://docs.cloud.google.com/iam/docs/roles-permissions, transcribed by hand. A permission
that is not listed is denied.
"""

OBJECTS = {f"storage.objects.{verb}" for verb in ("create", "delete", "get", "list", "update")}
BUCKETS = {
    f"storage.buckets.{verb}"
    for verb in ("create", "delete", "get", "list", "update", "getIamPolicy", "setIamPolicy")
}
IMAGES_READ = {
    "artifactregistry.repositories.downloadArtifacts",
    "artifactregistry.repositories.get",
    "artifactregistry.tags.get",
    "artifactregistry.versions.get",
}
IMAGES_WRITTEN = {"artifactregistry.repositories.uploadArtifacts", "artifactregistry.tags.create"}
NOTES = {
    f"containeranalysis.notes.{verb}" for verb in ("get", "list", "create", "attachOccurrence")
}
OCCURRENCES = {
    f"containeranalysis.occurrences.{verb}" for verb in ("get", "list", "create", "update")
}

PERMISSIONS: dict[str, set[str]] = {
    "roles/artifactregistry.admin": IMAGES_READ | IMAGES_WRITTEN,
    "roles/artifactregistry.writer": IMAGES_READ | IMAGES_WRITTEN,
    "roles/containeranalysis.notes.editor": NOTES,
    "roles/containeranalysis.occurrences.editor": OCCURRENCES,
    "roles/monitoring.admin": {"monitoring.timeSeries.list"},
    "roles/monitoring.viewer": {"monitoring.timeSeries.list"},
    "roles/ondemandscanning.admin": {
        "ondemandscanning.scans.analyzePackages",
        "ondemandscanning.scans.listVulnerabilities",
        "ondemandscanning.operations.get",
    },
    "roles/pubsub.admin": {"pubsub.topics.get", "pubsub.topics.create", "pubsub.topics.publish"},
    "roles/pubsub.publisher": {"pubsub.topics.publish"},
    "roles/pubsub.viewer": {"pubsub.topics.get"},
    "roles/run.admin": {"run.services.get", "run.services.update", "run.operations.get"},
    "roles/run.viewer": {"run.services.get", "run.operations.get"},
    "roles/secretmanager.admin": {"secretmanager.versions.access", "secretmanager.versions.add"},
    "roles/serviceusage.serviceUsageAdmin": {
        "serviceusage.services.enable",
        "serviceusage.services.use",
    },
    "roles/serviceusage.serviceUsageConsumer": {"serviceusage.services.use"},
    "roles/storage.admin": BUCKETS | OBJECTS,
    "roles/storage.objectAdmin": OBJECTS,
    # Overwriting an object requires the right to delete it.
    "roles/storage.objectCreator": {"storage.objects.create"},
    "roles/storage.objectViewer": {"storage.objects.get", "storage.objects.list"},
}
OWNER = "roles/owner"
"""May do everything."""
