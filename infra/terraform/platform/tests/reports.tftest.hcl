# Scheduled reports, against a stand-in of the provider: make terraform-check.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  api               = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1 }
  inboxes           = { per_region = 2, slots = 2 }
}

run "none_by_default" {
  command = plan

  assert {
    condition     = length(google_cloud_scheduler_job.reports) == 0 && length(module.reports) == 0 && length(google_monitoring_alert_policy.reports) == 0
    error_message = "Reports are asked for, by the function's image."
  }
}

run "in_the_billing_zone" {
  command = plan

  variables {
    functions = { reports = { image = "europe-west4-docker.pkg.dev/p/penstock/functions@sha256:0", schedule = "30 3 * * *", time_zone = "Europe/Berlin" } }
  }

  assert {
    condition     = { for name, job in google_cloud_scheduler_job.reports : name => job.schedule } == { anomalies = "10 * * * *", daily = "30 3 * * *" }
    error_message = "A run a day, and a look at each hour."
  }

  assert {
    condition = alltrue([
      for job in google_cloud_scheduler_job.reports :
      job.time_zone == "Europe/Berlin" && job.attempt_deadline == "600s" && job.retry_config[0].retry_count == 5
      && job.http_target[0].oidc_token[0].audience == "penstock-reports"
    ])
    error_message = "Jobs run by the clock of the billing zone, wait longer than a run takes, try again, and say who calls."
  }

  assert {
    condition     = { for name, job in google_cloud_scheduler_job.reports : name => jsondecode(base64decode(job.http_target[0].body)) } == { anomalies = { only = "anomalies" }, daily = {} }
    error_message = "The body says what is to be done."
  }

  assert {
    condition = toset(google_project_iam_custom_role.day_writer["reports"].permissions) == toset([
      "bigquery.tables.get", "bigquery.tables.getData", "bigquery.tables.update", "bigquery.tables.updateData"
    ])
    error_message = "Who replaces days can't delete their table."
  }

  assert {
    condition     = toset(keys(google_bigquery_table_iam_member.reports_write)) == toset(["anomalies", "daily_usage"])
    error_message = "It writes its own tables only."
  }

  assert {
    condition     = !contains(keys(module.objects.members), "reports") && module.reports["reports"].bucket.versioning[0].enabled
    error_message = "Invoices are in a bucket of their own, with earlier versions."
  }

  assert {
    condition     = strcontains(google_monitoring_alert_policy.reports["reports-anomalies"].conditions[0].condition_matched_log[0].filter, "service_name=\"penstock-reports\"")
    error_message = "The log of the function tells of anomalies."
  }
}
