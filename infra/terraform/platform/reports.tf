# Scheduled reports: when they are made, what they may read and write, and what
# tells of them. The function is one of functions.tf.

locals {
  _reports = { for name, function in local._functions : name => function if name == "reports" }
  _report_jobs = merge([for function in values(local._reports) : {
    anomalies = { schedule = "10 * * * *", body = { only = "anomalies" } }
    daily     = { schedule = function.schedule, body = {} }
  }]...)
  _report_alerts = { for key, alert in jsondecode(templatefile("${local._monitoring}/log-alerts.json.tftpl", {
    service = "${var.prefix}-reports"
  })) : key => alert if length(local._reports) > 0 }
  # The API and the function have defaults for those that are not set.
  invoice_settings = { for name, value in {
    PENSTOCK_INVOICE_SELLER      = local.options.invoices.seller
    PENSTOCK_INVOICE_TAX_NAME    = local.options.invoices.tax_name
    PENSTOCK_INVOICE_TAX_PERCENT = local.options.invoices.tax_percent
  } : name => tostring(value) if value != null }
  report_account  = { for name in keys(local._reports) : name => google_service_account.functions[name].member }
  report_settings = merge(local.invoice_settings, { for function in values(local._reports) : "PENSTOCK_BILLING_TZ" => function.time_zone })
}

resource "google_cloud_scheduler_job" "reports" {
  for_each = local._report_jobs

  project          = var.project_id
  region           = local.home
  name             = "${var.prefix}-reports-${each.key}"
  description      = "Sums up days, makes invoices, looks for anomalies"
  schedule         = each.value.schedule
  time_zone        = local.report_settings["PENSTOCK_BILLING_TZ"]
  attempt_deadline = "600s"

  http_target {
    http_method = "POST"
    uri         = module.function["reports"].url
    headers     = { "Content-Type" = "application/json" }
    body        = base64encode(jsonencode(each.value.body))

    oidc_token {
      service_account_email = module.function["reports"].invoker_email
      audience              = module.function["reports"].audience
    }
  }

  # BigQuery may be away: an hour and a half until the last attempt.
  retry_config {
    retry_count          = 5
    min_backoff_duration = "60s"
    max_backoff_duration = "1800s"
    max_doublings        = 5
  }
}

# Not the bucket of objects: workers may write over all of that.
module "reports" {
  source   = "../modules/bucket"
  for_each = local._reports

  project_id          = var.project_id
  name                = "${var.project_id}-${var.prefix}-reports"
  location            = var.storage_location
  labels              = var.labels
  deletion_protection = var.deletion_protection
  versioning          = true # an invoice that is made again does not remove what was sent

  # A put of the same name writes over it, which takes the right to delete.
  members = { for name, member in local.report_account : name => { member = member, role = "roles/storage.objectUser" } }

  depends_on = [google_project_service.default]
}

resource "google_bigquery_table_iam_member" "reports_read" {
  for_each = local.report_account

  project    = var.project_id
  dataset_id = google_bigquery_table.rows.dataset_id
  table_id   = google_bigquery_table.rows.table_id
  role       = "roles/bigquery.dataViewer"
  member     = each.value
}

resource "google_project_iam_member" "reports_query" {
  for_each = local.report_account

  project = var.project_id
  role    = "roles/bigquery.jobUser"
  member  = each.value
}

# To replace a partition takes the right to update the table. dataEditor could also delete it.
resource "google_project_iam_custom_role" "day_writer" {
  for_each = local._reports

  project     = var.project_id
  role_id     = "${replace(var.prefix, "-", "_")}_day_writer"
  title       = "Penstock day writer"
  description = "Reads a table and replaces its partitions."
  permissions = [
    "bigquery.tables.get", "bigquery.tables.getData", "bigquery.tables.update", "bigquery.tables.updateData",
  ]

  depends_on = [google_project_service.default]
}

resource "google_bigquery_table_iam_member" "reports_write" {
  for_each = length(local._reports) == 0 ? [] : toset(["anomalies", "daily_usage"])

  project    = var.project_id
  dataset_id = google_bigquery_dataset.default.dataset_id
  table_id   = google_bigquery_table.others[each.key].table_id
  role       = google_project_iam_custom_role.day_writer["reports"].id
  member     = local.report_account["reports"]
}

# Nobody scrapes the function, so its log tells.
resource "google_monitoring_alert_policy" "reports" {
  for_each = local._report_alerts

  project               = var.project_id
  display_name          = "${var.prefix}: ${each.value.title}"
  combiner              = "OR"
  notification_channels = local.channels
  severity              = each.value.severity
  user_labels           = merge(var.labels, { alert = each.key })

  alert_strategy {
    auto_close = "86400s"

    notification_rate_limit {
      period = "3600s"
    }
  }

  conditions {
    display_name = each.value.title

    condition_matched_log {
      filter = each.value.filter
    }
  }

  documentation {
    content = "What it means and what to do: ${each.value.anchor}"
    subject = "${var.prefix}: ${each.value.title}"

    dynamic "links" {
      for_each = local.options.alerts.runbook_url == null ? {} : { runbook = local.options.alerts.runbook_url }

      content {
        display_name = "Runbook"
        url          = "${links.value}#${split("#", each.value.anchor)[1]}"
      }
    }
  }

  depends_on = [google_project_service.default]
}
