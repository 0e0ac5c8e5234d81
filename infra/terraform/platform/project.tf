# What the project has to have before anything else.

data "google_project" "default" {
  project_id = var.project_id
}

locals {
  _number = data.google_project.default.number
  # The agent has this address; a right can be given to it only once it exists.
  pubsub_agent = "serviceAccount:service-${local._number}@gcp-sa-pubsub.iam.gserviceaccount.com"
  services = concat(
    [
      "artifactregistry", "bigquery", "cloudbuild", "cloudresourcemanager", "cloudscheduler", "compute", "container",
      "containeranalysis",
      "containerfilesystem", "dns", "iam", "iamcredentials", "logging", "memorystore", "monitoring", "networkconnectivity",
      "ondemandscanning", "pubsub", "run", "secretmanager", "serviceconsumermanagement", "servicenetworking",
      "serviceusage", "storage", "sts",
    ],
    local.trace_services,
    local.options.budget == null ? [] : ["billingbudgets"],
    local.options.nodes.binary_authorization ? ["binaryauthorization", "cloudkms"] : [],
  )
  storage_regions = var.keep_messages_in_regions ? sort(keys(local.options.regions)) : []
  workers_member  = "principalSet://${local._pool}/namespace/${var.namespace}"

  # Rights go to Kubernetes service accounts themselves: no key, no account
  # of Google's in between. Their pool exists once a cluster does, and IAM
  # refuses members of a pool that is not there: so its name comes from the
  # clusters, and whoever uses it waits for them.
  _pool             = "iam.googleapis.com/projects/${local._number}/locations/global/workloadIdentityPools/${one(distinct(values(module.cluster)[*].workload_pool))}"
  workload_identity = "principal://${local._pool}"
}

resource "google_project_service" "default" {
  for_each = toset(local.services)

  project            = var.project_id
  service            = "${each.key}.googleapis.com"
  disable_on_destroy = false
}

# An API's agent may come into being only at its first use. Rights are given
# to these before that: Pub/Sub moves dead letters and signs pushes, Network
# Connectivity makes the addresses of Redis.
resource "google_project_service_identity" "default" {
  provider = google-beta
  for_each = toset(["networkconnectivity", "pubsub"])

  project = var.project_id
  service = google_project_service.default[each.key].service
}

# An agent that was asked for gets no role by itself.
resource "google_project_iam_member" "network_agent" {
  project = var.project_id
  role    = "roles/networkconnectivity.serviceAgent"
  member  = google_project_service_identity.default["networkconnectivity"].member
}

resource "google_artifact_registry_repository" "default" {
  project       = var.project_id
  location      = var.registry_location
  repository_id = var.prefix
  description   = "Images of API, workers and functions"
  format        = "DOCKER"
  labels        = var.labels

  cleanup_policies {
    id     = "keep-newest"
    action = "KEEP"

    most_recent_versions {
      keep_count = 20
    }
  }

  cleanup_policies {
    id     = "delete-untagged"
    action = "DELETE"

    condition {
      tag_state  = "UNTAGGED"
      older_than = "1209600s"
    }
  }

  # Each build tags its images. What runs for longer than this, while twenty
  # newer ones were built, could not be pulled again.
  cleanup_policies {
    id     = "delete-old"
    action = "DELETE"

    condition {
      tag_state  = "ANY"
      older_than = "15552000s"
    }
  }

  # checkov:skip=CKV_GCP_84: Google's own keys are enough for images that hold no data
  depends_on = [google_project_service.default]
}

resource "google_compute_network" "default" {
  # checkov:skip=CKV2_GCP_18: the implied rules deny all ingress, GKE adds what its nodes need

  project                 = var.project_id
  name                    = var.prefix
  auto_create_subnetworks = false

  depends_on = [google_project_service.default]
}
