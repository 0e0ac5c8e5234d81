# Against a stand-in of the provider: make terraform-check.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  api               = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1, keys_in_redis = true }
  inboxes           = { per_region = 2, slots = 2 }
}

run "keys_in_redis_are_exported_every_hour" {
  command = plan

  assert {
    condition     = one(values(google_cloud_scheduler_job.keys)[*].schedule) == "20 * * * *" && one(values(google_cloud_run_v2_job.keys)[*].template[0].template[0].containers[0].args)[0] == "keys"
    error_message = "A job a day or less would lose the keys of a day."
  }

  assert {
    condition     = [for right in values(module.keys["export"].members) : right.role] == ["roles/storage.objectCreator"]
    error_message = "What exports keys can't change what it exported before."
  }

  assert {
    condition     = length(google_monitoring_alert_policy.keys) == 1
    error_message = "An export that fails is told of."
  }
}

run "keys_in_a_secret_have_versions_there" {
  command = plan

  variables {
    api = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1 }
  }

  assert {
    condition     = length(google_cloud_scheduler_job.keys) == 0 && length(module.keys) == 0
    error_message = "Nothing is exported."
  }
}
