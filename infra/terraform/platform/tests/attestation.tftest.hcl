# Against a stand-in of the provider: make terraform-check.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  inboxes           = { per_region = 2, slots = 2 }
}

run "nobody_signs_by_default" {
  command = plan

  variables {
    api = { max_instances = 1 }
  }

  assert {
    condition     = length(google_binary_authorization_policy.default) == 0 && length(google_kms_crypto_key.release) == 0 && output.attestor == null
    error_message = "Nodes ask for nobody."
  }
}

run "nodes_run_what_was_approved" {
  command = plan

  variables {
    api   = { max_instances = 1 }
    nodes = { binary_authorization = true }
  }

  assert {
    condition = alltrue([
      for policy in google_binary_authorization_policy.default :
      policy.default_admission_rule[0].evaluation_mode == "REQUIRE_ATTESTATION"
      && policy.default_admission_rule[0].enforcement_mode == "ENFORCED_BLOCK_AND_AUDIT_LOG"
      && policy.global_policy_evaluation_mode == "ENABLE"
    ]) && length(google_binary_authorization_policy.default) == 1
    error_message = "An image without an attestation is not run, but for those of Google's own policy."
  }

  # What is not ours, as KEDA and the placeholders of warm nodes, has no attestation.
  assert {
    condition     = alltrue([for pattern in google_binary_authorization_policy.default["release"].admission_whitelist_patterns : !strcontains(pattern.name_pattern, "example-project")])
    error_message = "No image of ours does without."
  }

  assert {
    condition     = google_kms_crypto_key.release["release"].purpose == "ASYMMETRIC_SIGN" && contains(keys(google_project_service.default), "cloudkms")
    error_message = "The key signs, and its API is on."
  }
}

run "registry_of_a_continent" {
  command = plan

  variables {
    api = { max_instances = 1 }
  }

  assert {
    condition     = google_artifact_registry_repository.default.location == "europe"
    error_message = "Nodes elsewhere get images while the home region is out."
  }
}

run "registry_that_nobody_placed" {
  command = plan

  variables {
    api               = { max_instances = 1 }
    registry_location = null
  }

  expect_failures = [var.registry_location]
}

run "registry_of_an_older_deployment" {
  command = plan

  variables {
    api               = { max_instances = 1 }
    registry_location = "europe-west4"
  }

  assert {
    condition     = google_artifact_registry_repository.default.location == "europe-west4"
    error_message = "It stays where it is."
  }
}
