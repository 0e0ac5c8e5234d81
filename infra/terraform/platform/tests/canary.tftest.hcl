# Against a stand-in of the provider: make terraform-check.

run "a_canary_has_topics_and_workers_of_its_own" {
  command = plan

  variables {
    api               = { max_instances = 1 }
    inboxes           = { per_region = 2, slots = 1 }
    models_file       = "tests/canary.models.yaml"
    project_id        = "example-project"
    registry_location = "europe"
  }

  assert {
    condition = jsonencode(output.worker_accounts) == jsonencode({
      "others"       = "worker-others"
      "texts"        = "worker-texts"
      "texts.canary" = "worker-texts-canary"
    })
    error_message = "The canary's workers have an account of their own."
  }

  assert {
    condition = jsonencode(local._forwarding_members) == jsonencode({
      texts = { canary-gke = local._worker_members["texts.canary"].gke, stable-gke = local._worker_members["texts"].gke }
    })
    error_message = "Workers of both revisions send jobs of the canary to the other revision's topic, and nobody else does."
  }
}
