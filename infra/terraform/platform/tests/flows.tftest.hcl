# Against a stand-in of the provider: make terraform-check.

run "workers_of_a_flow_send_each_other_jobs" {
  command = plan

  variables {
    api               = { max_instances = 1 }
    inboxes           = { per_region = 2, slots = 1 }
    models_file       = "tests/flows.models.yaml"
    project_id        = "example-project"
    registry_location = "europe"
  }

  assert {
    condition = jsonencode(local._flow_members) == jsonencode({
      others = {}
      texts = {
        flow-texts-gke = local._worker_members["texts"].gke
        flow-words-gke = local._worker_members["words"].gke
      }
      words = {
        flow-texts-gke = local._worker_members["texts"].gke
        flow-words-gke = local._worker_members["words"].gke
      }
    })
    error_message = "Workers of a flow's models send jobs to the topics of all of them, and nobody else does."
  }
}
