# The API: stateless, so any number of instances in any number of regions.

locals {
  environment = {
    PENSTOCK_ANSWERS_MAX_BYTES     = tostring(var.records_max_bytes)
    PENSTOCK_DATASET               = var.dataset
    PENSTOCK_HOST                  = "0.0.0.0"
    PENSTOCK_IDEMPOTENCY_KEEP_S    = tostring(var.api.idempotency_keep_s)
    PENSTOCK_INBOX_POOL            = tostring(var.inboxes.count)
    PENSTOCK_KEYS_URL              = var.api.keys_in_redis ? var.records_url : "file:///etc/penstock-keys/keys.json"
    PENSTOCK_MAX_IN_FLIGHT         = tostring(var.api.max_in_flight)
    PENSTOCK_METRICS_PORT          = "9464"
    PENSTOCK_MODELS_FILE           = "/etc/penstock/models.yaml"
    PENSTOCK_OBJECTS_URL           = var.objects_url
    PENSTOCK_PORT                  = tostring(local.port)
    PENSTOCK_PREDICTION_KEEP_S     = tostring(var.api.prediction_keep_s)
    PENSTOCK_PREDICTIONS_MAX_BYTES = tostring(var.records_max_bytes)
    PENSTOCK_PROJECT               = var.project_id
    PENSTOCK_RECORDS_URL           = var.records_url
    PENSTOCK_REDIS_URL             = var.redis_url
    PENSTOCK_REGION                = var.region
    PENSTOCK_REPLY_SLOTS           = tostring(var.inboxes.slots)
    PENSTOCK_ROWS_URL              = var.rows_url
    PENSTOCK_SPOOL_DIR             = "/var/spool/penstock"
    PENSTOCK_SPOOL_MAX_BYTES       = tostring(256 * 1024 * 1024)
    # Whatever connects to a container on Cloud Run is Google's front end,
    # which ends TLS and writes this header itself.
    PENSTOCK_TRUSTED_PROXIES = "*"
  }
  # Each region leases its inboxes from a Redis of its own: their numbers
  # must not meet.
  first_inbox = var.inboxes.first == 0 ? {} : { PENSTOCK_INBOX_FIRST = tostring(var.inboxes.first) }
  public_url  = var.api.public_url == "" ? {} : { PENSTOCK_PUBLIC_URL = var.api.public_url }
  port        = 8080
  secrets = {
    PENSTOCK_SECRET          = var.secrets.links
    PENSTOCK_WEBHOOK_SECRETS = var.secrets.webhooks
  }
}

resource "google_cloud_run_v2_service" "api" {
  for_each = var.api.image == null ? {} : { api = var.api.image }

  project              = var.project_id
  location             = var.region
  name                 = "${var.prefix}-api"
  labels               = var.labels
  deletion_protection  = var.deletion_protection
  ingress              = var.api.behind_balancer ? "INGRESS_TRAFFIC_INTERNAL_LOAD_BALANCER" : "INGRESS_TRAFFIC_ALL"
  default_uri_disabled = var.api.behind_balancer

  # Callers are known by API keys, not by Google accounts.
  invoker_iam_disabled = true

  template {
    service_account                  = var.api.service_account
    max_instance_request_concurrency = var.api.concurrency
    timeout                          = "${var.api.timeout_s}s"

    scaling {
      max_instance_count = var.api.max_instances
      min_instance_count = var.api.min_instances
    }

    containers {
      name  = "api"
      image = each.value

      dynamic "env" {
        for_each = merge(local.environment, local.first_inbox, local.public_url, var.invoices, var.traces)

        content {
          name  = env.key
          value = env.value
        }
      }

      dynamic "env" {
        for_each = local.secrets

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

      # Replies come in outside of requests: the CPU must not be taken away.
      resources {
        cpu_idle          = false
        startup_cpu_boost = true
        limits            = { cpu = tostring(var.api.cpu), memory = var.api.memory }
      }

      ports {
        container_port = local.port
      }

      # Goes through Pub/Sub and back: direct VPC egress may need a minute.
      startup_probe {
        failure_threshold = 24
        period_seconds    = 5
        timeout_seconds   = 4

        http_get {
          path = "/readyz"
          port = local.port
        }
      }

      liveness_probe {
        period_seconds  = 10
        timeout_seconds = 5

        http_get {
          path = "/livez"
          port = local.port
        }
      }

      volume_mounts {
        name       = "models"
        mount_path = "/etc/penstock"
      }

      volume_mounts {
        name       = "keys"
        mount_path = "/etc/penstock-keys"
      }
    }

    # Scrapes the API on localhost, on a port that nobody can call from
    # outside, and writes to Managed Prometheus, which
    # the autoscaler of the workers asks.
    containers {
      name       = "metrics"
      image      = var.api.metrics_image
      depends_on = ["api"]

      resources {
        limits = { cpu = "0.5", memory = "256Mi" }
      }

      volume_mounts {
        name       = "scraping"
        mount_path = "/etc/rungmp"
      }
    }

    volumes {
      name = "models"

      secret {
        secret = var.secrets.models.secret

        items {
          path    = "models.yaml"
          version = var.secrets.models.version
        }
      }
    }

    # The latest version, which Cloud Run fetches at each read: a revoked key
    # is refused within seconds and without a new revision.
    volumes {
      name = "keys"

      secret {
        secret = var.secrets.api_keys.secret

        items {
          path    = "keys.json"
          version = var.secrets.api_keys.version
        }
      }
    }

    volumes {
      name = "scraping"

      secret {
        secret = var.secrets.scraping.secret

        items {
          path    = "config.yaml"
          version = var.secrets.scraping.version
        }
      }
    }

    vpc_access {
      egress = "PRIVATE_RANGES_ONLY"

      network_interfaces {
        network    = var.network
        subnetwork = google_compute_subnetwork.api.id
      }
    }
  }

  lifecycle {
    # Who serves is the rollout's to say (infra/rollout): an apply makes a
    # revision, which gets no traffic once the traffic names another.
    ignore_changes = [client, client_version, traffic]
  }
}

resource "google_compute_region_network_endpoint_group" "api" {
  for_each = var.api.behind_balancer ? google_cloud_run_v2_service.api : {}

  project               = var.project_id
  region                = var.region
  name                  = "${var.prefix}-api-${var.region}"
  network_endpoint_type = "SERVERLESS"

  cloud_run {
    service = each.value.name
  }
}
