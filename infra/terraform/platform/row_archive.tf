# Rows outlive who wrote them: API, workers and functions put them into a bucket
# at once, and one process takes them from there into Parquet files and into
# BigQuery. A pod may go while BigQuery is unreachable, and its rows stay
# (docs/decisions/0096-rows-on-google.md).

locals {
  rows_url = local.options.rows.archive ? "gs://${module.rows.name}" : ""
  # The archive is the API's image with another command.
  _row_archives = local.options.rows.archive && local.options.api.image != null ? { archive = local.options.api.image } : {}
  _archived     = ["rows", "webhook_deliveries", "worker_hours", "worker_starts"]
  _row_putters = merge(local.repliers, {
    for name, account in google_service_account.functions : name => account.member if name == "webhooks"
  })
  row_archive_alerts = length(local._row_archives) == 0 ? {} : {
    rows-not-archived = {
      anchor              = "docs/how-to/troubleshoot.md#rows-not-archived"
      duration            = "300s"
      evaluation_interval = "60s"
      query               = "max(penstock_row_archive_oldest_seconds) > 900"
      severity            = "WARNING"
      title               = "Rows: not archived"
    }
    # Without the process nobody says how old they are.
    row-archive-missing = {
      anchor              = "docs/how-to/troubleshoot.md#rows-the-archive-is-gone"
      duration            = "900s"
      evaluation_interval = "60s"
      query               = "absent(penstock_row_archive_oldest_seconds)"
      severity            = "CRITICAL"
      title               = "Rows: the archive is gone"
    }
  }
}

module "rows" {
  source = "../modules/bucket"

  project_id          = var.project_id
  name                = "${var.project_id}-${var.prefix}-rows"
  location            = var.storage_location
  labels              = var.labels
  deletion_protection = var.deletion_protection
  aborts_uploads      = true
  soft_delete_days    = 7 # what was deleted by mistake can be brought back

  # As long as BigQuery keeps them. A day's files are written again when it is merged.
  deleted = [{
    days    = tonumber(local.table_options.timePartitioning.expirationMs) / 86400000 + 3
    folders = ["archive", "rejected"]
  }]

  # Who writes rows may add some, and read, change or delete none: neither its own
  # nor those of others.
  members = {
    for name, member in local._row_putters : name => {
      folder = "incoming"
      member = member
      role   = "roles/storage.objectCreator"
      title  = "incoming rows"
    }
  }

  depends_on = [google_project_service.default]
}

resource "google_service_account" "row_archive" {
  project      = var.project_id
  account_id   = "${var.prefix}-row-archive"
  display_name = "Runs the row archive"

  depends_on = [google_project_service.default]
}

# By itself, so that the archive waits for its own right and for nobody else's.
resource "google_storage_bucket_iam_member" "row_archive" {
  bucket = module.rows.name
  role   = "roles/storage.objectUser"
  member = google_service_account.row_archive.member
}

# A load job adds rows and may widen the schema, though ours never does. dataEditor could also delete the table.
resource "google_project_iam_custom_role" "row_loader" {
  project     = var.project_id
  role_id     = "${replace(var.prefix, "-", "_")}_row_loader"
  title       = "Penstock row loader"
  description = "Loads rows into a table."
  permissions = ["bigquery.tables.get", "bigquery.tables.update", "bigquery.tables.updateData"]

  depends_on = [google_project_service.default]
}

resource "google_bigquery_table_iam_member" "row_archive" {
  for_each = toset(local._archived)

  project    = var.project_id
  dataset_id = google_bigquery_dataset.default.dataset_id
  table_id   = each.key == "rows" ? google_bigquery_table.rows.table_id : google_bigquery_table.others[each.key].table_id
  role       = google_project_iam_custom_role.row_loader.id
  member     = google_service_account.row_archive.member
}

resource "google_project_iam_member" "row_archive" {
  for_each = toset(["roles/bigquery.jobUser", "roles/monitoring.metricWriter"])

  project = var.project_id
  role    = each.key
  member  = google_service_account.row_archive.member
}

resource "google_secret_manager_secret_iam_member" "row_archive" {
  project   = var.project_id
  secret_id = google_secret_manager_secret.default["scraping"].secret_id
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.row_archive.member
}

# A service, not a worker pool: the metrics of the sidecar are named after the
# service that it is in, which a worker pool is not. One instance: two would do
# the same work. While a revision replaces another there are two, for seconds.
resource "google_cloud_run_v2_service" "row_archive" {
  for_each = local._row_archives

  project             = var.project_id
  location            = local.home
  name                = "${var.prefix}-row-archive"
  labels              = var.labels
  ingress             = "INGRESS_TRAFFIC_INTERNAL_ONLY"
  deletion_protection = false

  template {
    service_account = google_service_account.row_archive.email

    scaling {
      max_instance_count = 1
      min_instance_count = 1
    }

    containers {
      name    = "row-archive"
      image   = each.value
      command = ["python"]
      args    = ["-m", "infra.row_archive"]

      dynamic "env" {
        for_each = {
          PENSTOCK_ARCHIVE_EVERY_S = tostring(local.options.rows.every_s)
          PENSTOCK_DATASET         = google_bigquery_dataset.default.dataset_id
          PENSTOCK_HEALTH_HOST     = "0.0.0.0"
          PENSTOCK_HEALTH_PORT     = "9464"
          PENSTOCK_PROJECT         = var.project_id
          PENSTOCK_REGION          = local.home
          PENSTOCK_ROWS_URL        = local.rows_url
        }

        content {
          name  = env.key
          value = env.value
        }
      }

      ports {
        container_port = 9464
      }

      # It works all the time, and nobody calls it.
      resources {
        cpu_idle = false
        limits   = { cpu = "1", memory = local.options.rows.memory }
      }

      startup_probe {
        failure_threshold = 12
        period_seconds    = 5
        timeout_seconds   = 4

        http_get {
          path = "/metrics"
          port = 9464
        }
      }

      liveness_probe {
        failure_threshold = 6
        period_seconds    = 10
        timeout_seconds   = 5

        http_get {
          path = "/metrics"
          port = 9464
        }
      }
    }

    containers {
      name       = "metrics"
      image      = local.options.api.metrics_image
      depends_on = ["row-archive"]

      resources {
        limits = { cpu = "0.5", memory = "256Mi" }
      }

      volume_mounts {
        name       = "scraping"
        mount_path = "/etc/rungmp"
      }
    }

    volumes {
      name = "scraping"

      secret {
        secret = local.secrets.scraping.secret

        items {
          path    = "config.yaml"
          version = local.secrets.scraping.version
        }
      }
    }
  }

  lifecycle {
    ignore_changes = [client, client_version]
  }

  depends_on = [
    google_bigquery_table_iam_member.row_archive, google_project_iam_member.row_archive,
    google_secret_manager_secret_iam_member.row_archive, google_storage_bucket_iam_member.row_archive
  ]
}
