# Against a stand-in of the provider: make terraform-check.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  api               = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1 }
  inboxes           = { per_region = 2, slots = 2 }
}

run "no_public_bucket" {
  command = plan

  assert {
    condition = alltrue([
      for bucket in [module.objects.bucket, module.weights.bucket, module.rows.bucket] :
      bucket.public_access_prevention == "enforced" && bucket.uniform_bucket_level_access
    ])
    error_message = "No bucket can be made public."
  }
}

run "objects_outlive_what_points_to_them" {
  command = plan

  assert {
    condition = {
      for rule in module.objects.bucket.lifecycle_rule :
      one(one(rule.condition).matches_prefix) => one(rule.condition).age
      if one(rule.action).type == "Delete"
    } == { "answers/" = 2, "batches/" = 31, "files/" = 1, "inputs/" = 8, "results/" = 7 }
    error_message = "Each folder has its own end."
  }
}
