# Against a stand-in of the provider: make terraform-check.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  api               = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1 }
  inboxes           = { per_region = 2, slots = 2 }
}

run "one_region_keeps_its_records_beside_the_cache" {
  command = plan

  override_module {
    target  = module.redis
    outputs = { url = "redis://10.64.32.2:6379/0" }
  }

  assert {
    condition     = length(module.records) == 0 && output.deployments["europe-west4"].records_url == "redis://10.64.32.2:6379/0"
    error_message = "One region needs no second Redis."
  }

  assert {
    condition     = module.region["europe-west4"].environment["PENSTOCK_ANSWERS_MAX_BYTES"] == "1300000000"
    error_message = "Answers may take a quarter of what their node takes."
  }
}

run "one_region_with_its_records_apart" {
  command = plan

  variables {
    records = { apart = true, node_type = "HIGHMEM_MEDIUM" }
  }

  assert {
    condition     = length(module.records) == 1
    error_message = "A second region can come later without moving the records."
  }

  assert {
    condition     = module.region["europe-west4"].environment["PENSTOCK_PREDICTIONS_MAX_BYTES"] == "2600000000"
    error_message = "The budget is that of the node that has the records."
  }
}

run "all_regions_have_one_redis_for_records" {
  command = plan

  variables {
    regions = { "europe-west1" = { index = 1 }, "europe-west4" = { index = 0 } }
  }

  override_module {
    target  = module.redis
    outputs = { url = "redis://10.68.32.2:6379/0" }
  }

  override_module {
    target  = module.records
    outputs = { url = "redis://10.64.32.9:6379/0" }
  }

  assert {
    condition     = distinct(values(output.deployments)[*].records_url) == tolist(["redis://10.64.32.9:6379/0"])
    error_message = "Workers of any region may take a job: all ask the same records."
  }

  assert {
    condition = alltrue([
      for region in module.region :
      region.environment["PENSTOCK_RECORDS_URL"] == "redis://10.64.32.9:6379/0" && region.environment["PENSTOCK_REDIS_URL"] == "redis://10.68.32.2:6379/0"
    ])
    error_message = "So do the APIs, which cache in their own region."
  }
}
