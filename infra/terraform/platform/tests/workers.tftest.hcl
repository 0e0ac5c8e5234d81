# Against a stand-in of the provider: make terraform-check.

variables {
  api               = { max_instances = 1 }
  inboxes           = { per_region = 2, slots = 1 }
  models_file       = "tests/workers.models.yaml"
  project_id        = "example-project"
  registry_location = "europe"
}

run "models_that_share_workers_have_one_account" {
  command = plan

  variables {
    outside = { abroad = { issuer = "https://k8s.example.com" } }
    weights = { hub_token = true }
  }

  assert {
    condition = jsonencode(output.worker_accounts) == jsonencode({
      "others" = "worker-others"
      "texts"  = "worker-reading"
      "words"  = "worker-reading"
    })
    error_message = "Workers that several models share have the name of their list."
  }

  assert {
    condition     = local._worker_members["texts"] == local._worker_members["words"] && length(local._worker_members["texts"]) == 2
    error_message = "Here and outside, the same account pulls the jobs of both models."
  }

  # Two grants of one right would be one in Google, which the end of either takes away.
  assert {
    condition     = alltrue([for members in values(local._flow_members) : length(distinct(values(members))) == length(members)])
    error_message = "Whoever serves several models of a flow gets each right once."
  }

  assert {
    condition     = jsonencode(local._hub_workers) == jsonencode({ others = "others", texts = "reading" })
    error_message = "Each account reads the token once."
  }

  assert {
    condition     = length(regexall("'worker', 'reading'", local._worker_hour_usd)) == 1 && length(regexall("label_replace", local._worker_hour_usd)) == 2
    error_message = "What they cost is counted once."
  }

  assert {
    condition     = contains(keys(local.alerts), "backlog-texts") && contains(keys(local.alerts), "backlog-words")
    error_message = "Each model has its alerts, as it has subscriptions of its own."
  }

  assert {
    condition     = jsonencode(sort(keys(local.gpus))) == jsonencode(["l4-x1", "l4-x4"])
    error_message = "They are one class of nodes."
  }
}

run "all_of_them_outside" {
  command = plan

  variables {
    outside = { abroad = { issuer = "https://k8s.example.com", models = ["words", "texts"] } }
  }

  assert {
    condition     = contains(keys(local._worker_members["words"]), "abroad") && !contains(keys(local._worker_members["others"]), "abroad")
    error_message = "Only models that were named pull there."
  }
}
