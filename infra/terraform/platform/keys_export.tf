# API keys in Redis are gone if Redis loses its data, and nobody can make them
# again: so they are exported every hour. The export has hashes, no keys.

locals {
  # The API's image with another command, as batches.tf.
  _keys_exports = local.options.api.keys_in_redis && local.options.api.image != null ? { export = local.options.api.image } : {}
}

# One account adds; each export has a separate name, and nobody may write over one.
module "keys" {
  source   = "../modules/bucket"
  for_each = local.options.api.keys_in_redis ? { export = true } : {}

  project_id          = var.project_id
  name                = "${var.project_id}-${var.prefix}-keys"
  location            = var.storage_location
  labels              = var.labels
  deletion_protection = var.deletion_protection
  deleted             = [{ days = 90 }]

  members = {
    for name in keys(local._keys_exports) : name => {
      member = google_service_account.keys_export["runs"].member
      role   = "roles/storage.objectCreator"
    }
  }

  depends_on = [google_project_service.default]
}

resource "google_service_account" "keys_export" {
  for_each = toset(length(local._keys_exports) == 0 ? [] : ["runs", "starts"])

  project      = var.project_id
  account_id   = "${var.prefix}-keys-${each.key}"
  display_name = each.key == "runs" ? "Exports API keys" : "Starts the export of API keys"

  depends_on = [google_project_service.default]
}

resource "google_cloud_run_v2_job" "keys" {
  for_each = local._keys_exports

  project             = var.project_id
  location            = local.home
  name                = "${var.prefix}-keys-export"
  labels              = var.labels
  deletion_protection = false

  template {
    template {
      service_account = google_service_account.keys_export["runs"].email
      max_retries     = 3
      timeout         = "300s"

      containers {
        image   = each.value
        command = ["penstock"]
        args    = ["keys", "export", "--to", "gs://${module.keys[each.key].name}"]

        env {
          name  = "PENSTOCK_KEYS_URL"
          value = local.records_url
        }

        resources {
          limits = { cpu = "1", memory = "512Mi" }
        }
      }

      vpc_access {
        egress = "PRIVATE_RANGES_ONLY"

        network_interfaces {
          network    = google_compute_network.default.id
          subnetwork = module.region[local.home].network.api_subnetwork
        }
      }
    }
  }

  lifecycle {
    ignore_changes = [client, client_version]
  }

  depends_on = [module.keys]
}

resource "google_cloud_run_v2_job_iam_member" "keys" {
  for_each = local._keys_exports

  project  = var.project_id
  location = local.home
  name     = google_cloud_run_v2_job.keys[each.key].name
  role     = "roles/run.invoker"
  member   = google_service_account.keys_export["starts"].member
}

resource "google_cloud_scheduler_job" "keys" {
  for_each = local._keys_exports

  project          = var.project_id
  region           = local.home
  name             = "${var.prefix}-keys-export"
  description      = "Exports API keys"
  schedule         = "20 * * * *"
  attempt_deadline = "180s"

  http_target {
    http_method = "POST"
    uri         = "https://run.googleapis.com/v2/${google_cloud_run_v2_job.keys[each.key].id}:run"

    # Google's own API takes a token of OAuth, not of OpenID.
    oauth_token {
      service_account_email = google_service_account.keys_export["starts"].email
    }
  }

  retry_config {
    retry_count = 3
  }

  depends_on = [google_cloud_run_v2_job_iam_member.keys]
}

# Nobody scrapes a job, so its log tells: an execution that failed for good.
resource "google_monitoring_alert_policy" "keys" {
  for_each = local._keys_exports

  project               = var.project_id
  display_name          = "${var.prefix}: Keys: the export fails"
  combiner              = "OR"
  notification_channels = local.channels
  severity              = "WARNING"
  user_labels           = merge(var.labels, { alert = "keys-export-failed" })

  alert_strategy {
    auto_close = "86400s"

    notification_rate_limit {
      period = "3600s"
    }
  }

  conditions {
    display_name = "Keys: the export fails"

    condition_matched_log {
      filter = "(resource.type=\"cloud_run_job\" AND resource.labels.job_name=\"${google_cloud_run_v2_job.keys[each.key].name}\" AND severity>=ERROR) OR (resource.type=\"cloud_scheduler_job\" AND resource.labels.job_id=\"${var.prefix}-keys-export\" AND severity>=ERROR)"
    }
  }

  documentation {
    content = "What it means and what to do: docs/how-to/troubleshoot.md#keys-the-export-fails"
    subject = "${var.prefix}: Keys: the export fails"

    dynamic "links" {
      for_each = local.options.alerts.runbook_url == null ? {} : { runbook = local.options.alerts.runbook_url }

      content {
        display_name = "Runbook"
        url          = "${links.value}#keys-the-export-fails"
      }
    }
  }

  depends_on = [google_project_service.default]
}
