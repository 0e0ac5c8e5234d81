# Against a stand-in of the provider: make terraform-check.

run "workers_have_names_that_kubernetes_takes" {
  command = plan

  variables {
    api               = { max_instances = 1 }
    inboxes           = { per_region = 2, slots = 1 }
    models_file       = "tests/names.models.yaml"
    project_id        = "example-project"
    registry_location = "europe"
  }

  assert {
    condition     = output.worker_accounts == jsondecode(file("tests/names.json"))
    error_message = "Rights go to the accounts that infra/kubernetes/overlay.py makes."
  }
}
