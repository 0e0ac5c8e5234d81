# Against a stand-in of the provider: make terraform-check.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  api               = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1 }
  inboxes           = { per_region = 2, slots = 2 }
}

run "from_the_hub" {
  command = plan

  assert {
    condition = output.deployments["europe-west4"].weights_bucket == null && output.deployments["europe-west4"].hub_token == null && (
      length(google_secret_manager_secret.hub_token) == 0 && length(google_storage_bucket_iam_member.kernels) == 0
    )
    error_message = "Nothing is mounted unless asked."
  }
}

run "prefetched_with_a_token" {
  command = plan

  variables {
    models_file = "tests/hub.models.yaml"
    weights     = { hub_token = true, prefetched = true }
  }

  assert {
    condition = output.deployments["europe-west4"].weights_bucket == "example-project-penstock-weights" && (
      output.deployments["europe-west4"].hub_token == "penstock-hub-token"
    )
    error_message = "The manifests know the bucket and the secret."
  }

  assert {
    condition = keys(google_storage_bucket_iam_member.kernels) == ["painter"] && (
      endswith(google_storage_bucket_iam_member.kernels["painter"].condition[0].expression, "/objects/kernels/painter/\")")
    )
    error_message = "Who compiles writes its own kernels, and nobody else."
  }

  assert {
    condition     = keys(google_secret_manager_secret_iam_member.hub_token) == ["gated", "gated.canary", "painter"]
    error_message = "Workers of hub models read the token, others do not."
  }
}
