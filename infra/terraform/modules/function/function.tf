# A function behind Pub/Sub push: it is called by one account only, and has
# no right but those that its stage gives to its account.

resource "google_service_account" "invoker" {
  project      = var.project_id
  account_id   = "${var.name}-push"
  display_name = "Pub/Sub calls ${var.name} as this account"
}

resource "google_cloud_run_v2_service" "default" {
  project             = var.project_id
  location            = var.region
  name                = var.name
  labels              = var.labels
  ingress             = "INGRESS_TRAFFIC_INTERNAL_ONLY"
  deletion_protection = false

  template {
    service_account                  = var.service_account
    timeout                          = "${var.timeout_s}s"
    max_instance_request_concurrency = var.concurrency

    containers {
      image = var.image

      dynamic "env" {
        for_each = var.environment

        content {
          name  = env.key
          value = env.value
        }
      }

      resources {
        limits = { cpu = "1", memory = "512Mi" }
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

# Pub/Sub signs the token of a push with the invoker's identity.
resource "google_service_account_iam_member" "push" {
  service_account_id = google_service_account.invoker.name
  role               = "roles/iam.serviceAccountTokenCreator"
  member             = var.pubsub_agent
}
