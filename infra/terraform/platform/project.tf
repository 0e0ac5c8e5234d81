# What the project has to have before anything else.

data "google_project" "default" {
  project_id = var.project_id
}

locals {
  _number         = data.google_project.default.number
  pubsub_agent    = "serviceAccount:service-${local._number}@gcp-sa-pubsub.iam.gserviceaccount.com"
  services        = ["artifactregistry", "bigquery", "cloudbuild", "compute", "container", "containeranalysis", "iam", "logging", "memorystore", "monitoring", "networkconnectivity", "ondemandscanning", "pubsub", "run", "secretmanager", "servicenetworking", "storage", "sts"]
  storage_regions = var.keep_messages_in_regions ? sort(keys(var.regions)) : []
  workers_member  = "principalSet://${local._pool}/namespace/${var.namespace}"

  # Rights go to Kubernetes service accounts themselves: no key, no account
  # of Google's in between.
  _pool             = "iam.googleapis.com/projects/${local._number}/locations/global/workloadIdentityPools/${var.project_id}.svc.id.goog"
  workload_identity = "principal://${local._pool}"
}

resource "google_project_service" "default" {
  for_each = toset(concat(local.services, local.trace_services, var.budget == null ? [] : ["billingbudgets"]))

  project            = var.project_id
  service            = "${each.key}.googleapis.com"
  disable_on_destroy = false
}

resource "google_artifact_registry_repository" "default" {
  project       = var.project_id
  location      = local.home
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
