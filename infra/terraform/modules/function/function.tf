# A function behind Pub/Sub push or Cloud Scheduler: it is called by one account
# only, and has no right but those that its stage gives to its account.

locals {
  # Not its URL, which is known only when it is there: it checks this itself.
  audience = var.name
  # Cloud Run lets nobody in but the invoker, and takes the signature off the
  # tokens that it has checked.
  environment = merge(var.environment, {
    FUNCTION_SOURCE          = "workers/functions/main.py"
    FUNCTION_TARGET          = var.target
    PENSTOCK_PUSH_ACCOUNT    = google_service_account.invoker.email
    PENSTOCK_PUSH_AUDIENCE   = local.audience
    PENSTOCK_PUSH_CHECKED_BY = "cloud-run"
  }, var.models == null ? {} : { PENSTOCK_MODELS_FILE = "/etc/penstock/models.yaml" })
  models = var.models == null ? {} : { models = var.models }
}

resource "google_service_account" "invoker" {
  project      = var.project_id
  account_id   = "${var.name}-push"
  display_name = "${var.pubsub_agent == null ? "Cloud Scheduler" : "Pub/Sub"} calls ${var.name} as this account"
}

resource "google_cloud_run_v2_service" "default" {
  project             = var.project_id
  location            = var.region
  name                = var.name
  labels              = var.labels
  ingress             = "INGRESS_TRAFFIC_INTERNAL_ONLY"
  custom_audiences    = [local.audience]
  deletion_protection = false

  template {
    service_account                  = var.service_account
    timeout                          = "${var.timeout_s}s"
    max_instance_request_concurrency = var.concurrency

    containers {
      image = var.image

      dynamic "env" {
        for_each = local.environment

        content {
          name  = env.key
          value = env.value
        }
      }

      dynamic "env" {
        for_each = var.secrets

        content {
          name = env.key

          value_source {
            secret_key_ref {
              secret  = env.value.secret
              version = env.value.version
            }
          }
        }
      }

      resources {
        limits = { cpu = "1", memory = "512Mi" }
      }

      dynamic "volume_mounts" {
        for_each = local.models

        content {
          name       = volume_mounts.key
          mount_path = "/etc/penstock"
        }
      }
    }

    dynamic "volumes" {
      for_each = local.models

      content {
        name = volumes.key

        secret {
          secret = volumes.value.secret

          items {
            path    = "models.yaml"
            version = volumes.value.version
          }
        }
      }
    }

    scaling {
      max_instance_count = var.max_instances
    }

    vpc_access {
      egress = "PRIVATE_RANGES_ONLY"

      network_interfaces {
        network    = var.network
        subnetwork = var.subnetwork
      }
    }
  }

  lifecycle {
    ignore_changes = [client, client_version]
  }
}

resource "google_cloud_run_v2_service_iam_member" "invoker" {
  project  = var.project_id
  location = var.region
  name     = google_cloud_run_v2_service.default.name
  role     = "roles/run.invoker"
  member   = google_service_account.invoker.member
}

# Pub/Sub signs the token of a push with the invoker's identity. The agent of
# Cloud Scheduler may do so by its own role.
resource "google_service_account_iam_member" "push" {
  for_each = var.pubsub_agent == null ? {} : { agent = var.pubsub_agent }

  service_account_id = google_service_account.invoker.name
  role               = "roles/iam.serviceAccountTokenCreator"
  member             = each.value
}
