# The rows and the tables alongside them: schemas, options and views are the files in
# infra/bigquery, which the embedded BigQuery of a laptop reads too.

locals {
  _bigquery     = "${path.module}/../../bigquery"
  table_options = jsondecode(file("${local._bigquery}/rows.table.json"))

  # Who adds rows to each table in addition to the rows. Days are replaced, see reports.tf.
  writers_of = {
    anomalies   = {}
    daily_usage = {}
    webhook_deliveries = {
      for name, account in google_service_account.functions : name => account.member if name == "webhooks"
    }
    worker_hours  = local._worker_accounts
    worker_starts = local._worker_accounts
  }
  _worker_accounts = merge(
    { workers = local.workers_member },
    { for name, member in local.outside_members : "outside-${name}" => member },
  )
}

resource "google_bigquery_dataset" "default" {
  project                    = var.project_id
  dataset_id                 = var.dataset
  location                   = var.dataset_location
  labels                     = var.labels
  delete_contents_on_destroy = !var.deletion_protection

  # checkov:skip=CKV_GCP_81: rows hold no inputs and no results, so Google's own keys are enough
  depends_on = [google_project_service.default]
}

resource "google_bigquery_table" "rows" {
  project                  = var.project_id
  dataset_id               = google_bigquery_dataset.default.dataset_id
  table_id                 = "rows"
  description              = local.table_options.description
  labels                   = var.labels
  schema                   = file("${local._bigquery}/rows.schema.json")
  clustering               = local.table_options.clustering.fields
  require_partition_filter = local.table_options.requirePartitionFilter
  deletion_protection      = var.deletion_protection

  time_partitioning {
    type          = local.table_options.timePartitioning.type
    field         = local.table_options.timePartitioning.field
    expiration_ms = tonumber(local.table_options.timePartitioning.expirationMs)
  }
  # checkov:skip=CKV_GCP_80: rows hold no inputs and no results, so Google's own keys are enough
  # checkov:skip=CKV_GCP_121: variable, on by default
}

resource "google_bigquery_table" "others" {
  for_each = {
    for name in keys(local.writers_of) : name => jsondecode(file("${local._bigquery}/${name}.table.json"))
  }

  project                  = var.project_id
  dataset_id               = google_bigquery_dataset.default.dataset_id
  table_id                 = each.key
  description              = each.value.description
  labels                   = var.labels
  schema                   = file("${local._bigquery}/${each.key}.schema.json")
  clustering               = each.value.clustering.fields
  require_partition_filter = each.value.requirePartitionFilter
  deletion_protection      = var.deletion_protection

  time_partitioning {
    type          = each.value.timePartitioning.type
    field         = each.value.timePartitioning.field
    expiration_ms = try(tonumber(each.value.timePartitioning.expirationMs), null)
  }
  # checkov:skip=CKV_GCP_80: no inputs and no results, so Google's own keys are enough
  # checkov:skip=CKV_GCP_121: variable, on by default
}

resource "google_bigquery_table" "views" {
  for_each = fileset("${local._bigquery}/views", "*.sql")

  project             = var.project_id
  dataset_id          = google_bigquery_dataset.default.dataset_id
  table_id            = trimsuffix(each.key, ".sql")
  labels              = var.labels
  deletion_protection = false

  view {
    use_legacy_sql = false
    query = templatefile("${local._bigquery}/views/${each.key}", {
      dataset = google_bigquery_table.rows.dataset_id
      only    = "TRUE"
      project = var.project_id
    })
  }
  # checkov:skip=CKV_GCP_80: a view holds no data
  # checkov:skip=CKV_GCP_121: a view can be made again
  depends_on = [google_bigquery_table.others]
}

# dataEditor could also delete the table.
resource "google_project_iam_custom_role" "row_writer" {
  project     = var.project_id
  role_id     = "${replace(var.prefix, "-", "_")}_row_writer"
  title       = "Penstock row writer"
  description = "Adds rows to a table and looks at its schema."
  permissions = ["bigquery.tables.get", "bigquery.tables.updateData"]

  depends_on = [google_project_service.default]
}

resource "google_bigquery_table_iam_member" "writers" {
  for_each = local.repliers

  project    = var.project_id
  dataset_id = google_bigquery_table.rows.dataset_id
  table_id   = google_bigquery_table.rows.table_id
  role       = google_project_iam_custom_role.row_writer.id
  member     = each.value
}

resource "google_bigquery_table_iam_member" "writers_of_others" {
  for_each = merge([
    for table, members in local.writers_of : {
      for name, member in members : "${table} ${name}" => { table = table, member = member }
    }
  ]...)

  project    = var.project_id
  dataset_id = google_bigquery_dataset.default.dataset_id
  table_id   = google_bigquery_table.others[each.value.table].table_id
  role       = google_project_iam_custom_role.row_writer.id
  member     = each.value.member
}

# The API reads the rows for what callers ask about their usage, and runs queries for that.
resource "google_bigquery_table_iam_member" "api_reads" {
  project    = var.project_id
  dataset_id = google_bigquery_table.rows.dataset_id
  table_id   = google_bigquery_table.rows.table_id
  role       = "roles/bigquery.dataViewer"
  member     = google_service_account.api.member
}

resource "google_project_iam_member" "api_queries" {
  project = var.project_id
  role    = "roles/bigquery.jobUser"
  member  = google_service_account.api.member
}
