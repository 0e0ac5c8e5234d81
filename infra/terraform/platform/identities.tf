# Who acts. Rights stand alongside what they are rights to: modules/model,
# modules/inbox, storage.tf, bigquery.tf, secrets.tf.

resource "google_service_account" "api" {
  project      = var.project_id
  account_id   = "${var.prefix}-api"
  display_name = "Runs the API"

  depends_on = [google_project_service.default]
}

# Metrics can only be written to, and read from, the project as a whole.
resource "google_project_iam_member" "api_metrics" {
  project = var.project_id
  role    = "roles/monitoring.metricWriter"
  member  = google_service_account.api.member
}

resource "google_project_iam_member" "keda" {
  project = var.project_id
  role    = "roles/monitoring.viewer"
  member  = "${local.workload_identity}/subject/ns/keda/sa/keda-operator"
}
