# What analysts of a tenant read: views of its rows, in a data set of its own.
# Who may read is in the rights of that data set, and not in a table of names.

locals {
  _tenant_files = merge(
    { for file in fileset("${local._bigquery}/views", "*.sql") : trimsuffix(file, ".sql") => "${local._bigquery}/views/${file}" },
    { for file in fileset("${local._bigquery}/tenant_views", "*.sql") : trimsuffix(file, ".sql") => "${local._bigquery}/tenant_views/${file}" },
  )
  # Those that can be limited to a tenant.
  _tenant_views = { for name, path in local._tenant_files : name => path if strcontains(file(path), "$${only}") }
  tenant_datasets = {
    for tenant in keys(local.options.analysts) : tenant => "${var.dataset}_tenant_${replace(lower(tenant), "/[^a-z0-9]/", "_")}"
  }
}

resource "google_bigquery_dataset" "tenants" {
  for_each = local.tenant_datasets

  project                    = var.project_id
  dataset_id                 = each.value
  friendly_name              = "${var.prefix}: ${each.key}"
  description                = "Views of the rows of one tenant, for its analysts."
  location                   = var.dataset_location
  labels                     = var.labels
  delete_contents_on_destroy = true

  # checkov:skip=CKV_GCP_81: views hold no data
  depends_on = [google_project_service.default]
}

resource "google_bigquery_table" "tenant_views" {
  for_each = merge([for tenant, dataset in local.tenant_datasets : {
    for name, path in local._tenant_views : "${tenant} ${name}" => { dataset = dataset, name = name, path = path, tenant = tenant }
  }]...)

  project             = var.project_id
  dataset_id          = google_bigquery_dataset.tenants[each.value.tenant].dataset_id
  table_id            = each.value.name
  labels              = var.labels
  deletion_protection = false

  view {
    use_legacy_sql = false
    query = templatefile(each.value.path, {
      dataset = google_bigquery_table.rows.dataset_id
      only    = "tenant = '${each.value.tenant}'"
      project = var.project_id
    })
  }
  # checkov:skip=CKV_GCP_80: a view holds no data
  # checkov:skip=CKV_GCP_121: a view can be made again
  depends_on = [google_bigquery_table.others]
}

# The views of these data sets read the rows, whoever asks them. Nobody but Terraform puts views there.
resource "google_bigquery_dataset_access" "tenants" {
  for_each = local.tenant_datasets

  project    = var.project_id
  dataset_id = google_bigquery_dataset.default.dataset_id

  dataset {
    target_types = ["VIEWS"]

    dataset {
      project_id = var.project_id
      dataset_id = google_bigquery_dataset.tenants[each.key].dataset_id
    }
  }
}

# They run their queries in a project of theirs, which pays for them.
resource "google_bigquery_dataset_iam_member" "analysts" {
  for_each = merge([for tenant, analysts in local.options.analysts : {
    for member in analysts.members : "${tenant} ${member}" => { tenant = tenant, member = member }
  }]...)

  project    = var.project_id
  dataset_id = google_bigquery_dataset.tenants[each.value.tenant].dataset_id
  role       = "roles/bigquery.dataViewer"
  member     = each.value.member
}
