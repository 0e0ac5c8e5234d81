# Against a stand-in of the provider: make terraform-check.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  api               = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1 }
  inboxes           = { per_region = 4, slots = 2 }
}

run "no_runner_by_default" {
  command = plan

  assert {
    condition     = length(google_cloud_run_v2_worker_pool.batches) == 0
    error_message = "A runner is asked for."
  }
}

run "runner_in_the_home_region" {
  command = plan

  variables {
    batches = { instances = 1 }
  }

  assert {
    condition = alltrue([
      for pool in google_cloud_run_v2_worker_pool.batches :
      pool.location == local.home && pool.scaling[0].manual_instance_count == 1
      && pool.template[0].containers[0].image == var.api.image
    ])
    error_message = "The API's image runs batches."
  }

  assert {
    condition = alltrue([
      for pool in google_cloud_run_v2_worker_pool.batches :
      !contains(pool.template[0].containers[0].env[*].name, "PENSTOCK_KEYS_URL")
    ])
    error_message = "The file of keys is not mounted there."
  }
}

run "runner_that_knows_the_budgets_of_now" {
  command = plan

  variables {
    api     = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1, keys_in_redis = true }
    batches = { instances = 1 }
  }

  assert {
    condition = alltrue([
      for pool in google_cloud_run_v2_worker_pool.batches :
      contains(pool.template[0].containers[0].env[*].name, "PENSTOCK_KEYS_URL")
    ])
    error_message = "Keys in Redis are for runners too."
  }
}
