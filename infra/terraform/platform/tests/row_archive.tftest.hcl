# Against a stand-in of the provider: make terraform-check.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  api               = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1 }
  functions         = { webhooks = { image = "europe-west4-docker.pkg.dev/p/penstock/functions@sha256:0" } }
  inboxes           = { per_region = 2, slots = 2 }
}

run "rows_outlive_who_wrote_them" {
  command = plan

  assert {
    condition     = output.deployments["europe-west4"].rows_url == "gs://example-project-penstock-rows"
    error_message = "Workers put rows into the bucket."
  }

  assert {
    condition     = module.region["europe-west4"].environment.PENSTOCK_ROWS_URL == "gs://example-project-penstock-rows"
    error_message = "So does the API."
  }

  assert {
    condition     = alltrue([for right in values(module.rows.members) : right.role == "roles/storage.objectCreator" && strcontains(right.condition[0].expression, "/objects/incoming/")])
    error_message = "Who writes rows reads, changes and deletes none, and adds none elsewhere."
  }

  assert {
    condition     = contains(keys(module.rows.members), "webhooks") && contains(keys(module.rows.members), "workers")
    error_message = "Deliveries of webhooks and hours of workers are rows too."
  }
}

run "one_process_takes_them_from_there" {
  command = plan

  assert {
    condition = alltrue([
      for service in google_cloud_run_v2_service.row_archive :
      service.template[0].containers[0].image == var.api.image
      && service.template[0].scaling[0].min_instance_count == 1 && service.template[0].scaling[0].max_instance_count == 1
      && !service.template[0].containers[0].resources[0].cpu_idle && service.ingress == "INGRESS_TRAFFIC_INTERNAL_ONLY"
    ]) && length(google_cloud_run_v2_service.row_archive) == 1
    error_message = "The archive is one instance of the API's image, which works all the time and which nobody calls."
  }

  assert {
    condition     = join(" ", sort(keys(google_bigquery_table_iam_member.row_archive))) == "rows webhook_deliveries worker_hours worker_starts"
    error_message = "It loads the four tables that others write."
  }

  assert {
    condition     = google_monitoring_alert_policy.default["rows-not-archived"].severity == "WARNING" && google_monitoring_alert_policy.default["row-archive-missing"].severity == "CRITICAL"
    error_message = "Somebody is told when rows wait, and when nobody takes them."
  }

  assert {
    condition     = [for rule in module.rows.bucket.lifecycle_rule : one(rule.condition).age if one(rule.action).type == "Delete"] == [403]
    error_message = "Files are kept as long as BigQuery keeps rows, and a little longer."
  }
}

run "straight_to_bigquery" {
  command = plan

  variables {
    rows = { archive = false }
  }

  assert {
    condition     = output.deployments["europe-west4"].rows_url == "" && length(google_cloud_run_v2_service.row_archive) == 0 && !contains(keys(google_monitoring_alert_policy.default), "rows-not-archived")
    error_message = "As before."
  }
}
