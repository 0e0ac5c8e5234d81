# Without an account: make terraform-check. What a module
# makes is asserted in its own tests.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  api               = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1 }
  inboxes           = { per_region = 2, slots = 2 }
}

run "every_model_of_the_catalog" {
  command = plan

  assert {
    condition     = toset(keys(output.topics)) == toset(yamldecode(file("../../../models.yaml")).models[*].name)
    error_message = "models.yaml alone says which models there are."
  }

  assert {
    condition = alltrue([
      for model, topics in output.topics :
      topics.topic_id == "jobs.${model}" && topics.workers_subscription_id == "jobs.${model}.workers" &&
      topics.batch_subscription_id == "jobs.${model}.batch" && topics.dead_letter_topic_id == "jobs.${model}.dead"
    ])
    error_message = "Each has topic, subscriptions and dead-letter topic."
  }

  assert {
    condition = alltrue([
      for model in keys(output.topics) : length([
        for alert in google_monitoring_alert_policy.default : alert if startswith(alert.display_name, "penstock: ${model}:")
      ]) == 2
    ])
    error_message = "Each has an alert on dead letters and one on jobs that wait."
  }
}

run "least_rights" {
  command = plan

  assert {
    condition = {
      (google_project_iam_member.api_metrics.role) = google_project_iam_member.api_metrics.member
      (google_project_iam_member.keda.role)        = split("/subject/", google_project_iam_member.keda.member)[1]
      } == {
      "roles/monitoring.metricWriter" = "serviceAccount:penstock-api@example-project.iam.gserviceaccount.com"
      "roles/monitoring.viewer"       = "ns/keda/sa/keda-operator"
    }
    error_message = "On the project as a whole: metrics, written by the API and read by the autoscaler."
  }

  assert {
    condition     = toset(google_project_iam_custom_role.row_writer.permissions) == toset(["bigquery.tables.get", "bigquery.tables.updateData"])
    error_message = "Who writes rows can neither read them nor delete the table."
  }

  assert {
    condition     = toset(values(module.objects.members)[*].role) == toset(["roles/storage.objectUser"])
    error_message = "Objects are written and read; the bucket is nobody's to change."
  }
}

run "table" {
  command = plan

  assert {
    condition     = jsondecode(google_bigquery_table.rows.schema) == jsondecode(file("../../bigquery/rows.schema.json"))
    error_message = "The table is that of infra/bigquery."
  }

  assert {
    condition     = google_bigquery_table.rows.require_partition_filter && google_bigquery_table.rows.time_partitioning[0].field == "received_at"
    error_message = "Rows are partitioned by the time they were received, and nobody reads all of them by mistake."
  }

  assert {
    condition = alltrue([
      for name in ["webhook_deliveries", "worker_hours", "worker_starts"] : (
        jsondecode(google_bigquery_table.others[name].schema) == jsondecode(file("../../bigquery/${name}.schema.json"))
        && google_bigquery_table.others[name].require_partition_filter
      )
    ])
    error_message = "The tables beside the rows are those of infra/bigquery."
  }

  assert {
    condition = toset(keys(google_bigquery_table_iam_member.writers_of_others)) == toset(concat(
      ["worker_hours workers", "worker_starts workers"],
      [for name in keys(google_service_account.functions) : "webhook_deliveries webhooks" if name == "webhooks"],
    ))
    error_message = "Each of them is written by those who know what it says, and by nobody else."
  }

  assert {
    condition     = strcontains(google_bigquery_table.views["rows_deduplicated.sql"].view[0].query, "`example-project.penstock.rows`")
    error_message = "The view reads this project's table."
  }
}

run "without_a_domain" {
  command = plan

  assert {
    condition     = length(google_compute_global_forwarding_rule.api) == 0 && length(google_compute_security_policy.api) == 0
    error_message = "Without a domain there is no balancer."
  }
}

run "behind_a_domain" {
  command = plan

  variables {
    domain = "api.example.com"
  }

  assert {
    condition = google_compute_backend_service.api["api"].load_balancing_scheme == "EXTERNAL_MANAGED" && (
      length(google_compute_backend_service.api["api"].backend) == 1
    ) && google_compute_global_forwarding_rule.api["api"].port_range == "443"
    error_message = "One address, HTTPS only, all regions behind it."
  }

  assert {
    condition     = length(google_compute_backend_service.api["api"].outlier_detection) == 0
    error_message = "The only region is not left, whatever it answers."
  }

  assert {
    condition = toset(google_compute_security_policy.api["api"].rule[*].action) == toset([
      "allow", "deny(403)", "deny(404)", "rate_based_ban"
    ])
    error_message = "Cloud Armor stands in front."
  }

  assert {
    condition     = output.api_urls == { "europe-west4" = "https://api.example.com" }
    error_message = "The domain is the API's address."
  }
}

run "a_region_is_left_when_it_fails_whole" {
  command = plan

  variables {
    domain  = "api.example.com"
    regions = { "europe-west1" = { index = 1 }, "europe-west4" = { index = 0 } }
  }

  assert {
    condition = alltrue([
      for found in google_compute_backend_service.api["api"].outlier_detection :
      found.consecutive_errors == 100 && found.consecutive_gateway_failure == 100 && found.max_ejection_percent == 50
    ]) && length(google_compute_backend_service.api["api"].outlier_detection) == 1
    error_message = "503 and 504 are answers of the API too: a few in a row say nothing of the region."
  }
}

run "functions_with_their_images" {
  command = plan

  variables {
    functions = { dead_letters = { image = "europe-west4-docker.pkg.dev/p/penstock/functions@sha256:0" } }
  }

  assert {
    condition     = toset(keys(google_service_account.functions)) == toset(["dead-letters"]) && length(google_pubsub_subscription.webhooks) == 0
    error_message = "A function is there as soon as its image is, and no other."
  }

  assert {
    condition     = toset(keys(module.objects.members)) == toset(["api", "dead-letters", "workers"])
    error_message = "The function that answers for dead letters may write what a worker may."
  }

  assert {
    condition = toset([for binding in google_secret_manager_secret_iam_member.functions : binding.secret_id]) == (
      toset(["penstock-models"])
    )
    error_message = "It reads the catalog, and no secret."
  }
}

run "a_region_more" {
  command = plan

  variables {
    regions = { "europe-west1" = { index = 1 }, "europe-west4" = { index = 0 } }
  }

  assert {
    condition     = toset(keys(output.clusters)) == toset(["europe-west1", "europe-west4"]) && length(output.deployments) == 2
    error_message = "Two regions have two of everything that is regional."
  }

  assert {
    condition     = length(module.inbox) == 4 && length(distinct([for inbox in module.inbox : inbox.topic_id])) == 4
    error_message = "Each region has inboxes of its own."
  }

  assert {
    condition     = sort(flatten(values(output.deployments)[*].redis_cidrs)) == tolist(["10.64.32.0/20", "10.64.32.0/20", "10.68.32.0/20"])
    error_message = "Workers of each region reach their own Redis and the records in the home region."
  }

  assert {
    condition     = startswith(output.registry, "europe-docker.pkg.dev/")
    error_message = "The registry stays where it was placed, whatever regions there are."
  }
}

run "inboxes_keep_their_numbers_when_more_are_added" {
  command = plan

  variables {
    inboxes = { per_region = 3, slots = 2 }
    regions = { "europe-west1" = { index = 1 }, "europe-west4" = { index = 0 } }
  }

  assert {
    condition     = [for inbox in module.inbox : inbox.topic_id] == ["inbox.0", "inbox.1", "inbox.1000", "inbox.1001", "inbox.1002", "inbox.2"]
    error_message = "A region's numbers begin where they began, however many inboxes it has."
  }

  assert {
    condition     = local.first_inbox == { "europe-west1" = 1000, "europe-west4" = 0 }
    error_message = "The API is told the same."
  }
}

run "slots_that_the_old_revision_has_stay" {
  command = plan

  variables {
    inboxes = { per_region = 2, slots = 2, kept_slots = 4 }
  }

  assert {
    condition     = length(module.inbox["0"].slots) == 4
    error_message = "An old revision waits for replies on each of its slots."
  }
}

run "a_region_drained" {
  command = plan

  variables {
    domain  = "api.example.com"
    regions = { "europe-west1" = { drained = true, index = 1 }, "europe-west4" = { index = 0 } }
  }

  assert {
    condition     = length(google_compute_backend_service.api["api"].backend) == 1 && length(output.clusters) == 2
    error_message = "Nothing is sent to it, and it stands."
  }

  assert {
    condition     = length(google_compute_backend_service.api["api"].outlier_detection) == 0
    error_message = "The one that serves has nobody to hand over to."
  }
}
