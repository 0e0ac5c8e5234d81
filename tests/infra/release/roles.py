"""What Google's predefined roles allow, as far as a release asks: of each role the permissions that
the stand-in for Google's APIs checks.

Source: https://docs.cloud.google.com/iam/docs/roles-permissions, read by hand. A permission that is
not listed is refused.
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
    "roles/ondemandscanning.admin": {
        "ondemandscanning.scans.analyzePackages",
        "ondemandscanning.scans.listVulnerabilities",
        "ondemandscanning.operations.get",
    },
    "roles/pubsub.admin": {"pubsub.topics.get", "pubsub.topics.create", "pubsub.topics.publish"},
    "roles/pubsub.publisher": {"pubsub.topics.publish"},
    "roles/run.admin": {"run.services.get", "run.services.update", "run.operations.get"},
    "roles/secretmanager.admin": {"secretmanager.versions.access", "secretmanager.versions.add"},
    "roles/secretmanager.secretAccessor": {"secretmanager.versions.access"},
    "roles/serviceusage.serviceUsageAdmin": {
        "serviceusage.services.enable",
        "serviceusage.services.use",
    },
    "roles/serviceusage.serviceUsageConsumer": {"serviceusage.services.use"},
    "roles/storage.admin": BUCKETS | OBJECTS,
    "roles/storage.objectAdmin": OBJECTS,
    # Writing over an object takes the right to delete it.
    "roles/storage.objectCreator": {"storage.objects.create"},
    "roles/viewer": IMAGES_READ
    | {
        "cloudbuild.builds.get",
        "containeranalysis.notes.get",
        "containeranalysis.occurrences.list",
        "monitoring.timeSeries.list",
        "ondemandscanning.operations.get",
        "pubsub.topics.get",
        "resourcemanager.projects.get",
        "run.services.get",
        "storage.buckets.list",
    },
}
OWNER = "roles/owner"
"""May do everything."""
OF_PROJECT_VIEWERS = "projectViewer"
"""On a bucket that gcloud made by itself: those whom the project calls viewers may read it."""
PERMISSIONS[OF_PROJECT_VIEWERS] = {
    "storage.buckets.get",
    "storage.objects.get",
    "storage.objects.list",
}
