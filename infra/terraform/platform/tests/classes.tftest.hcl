# Against a stand-in of the provider: make terraform-check.

variables {
  api               = { max_instances = 1 }
  inboxes           = { per_region = 2, slots = 1 }
  models_file       = "tests/classes.models.yaml"
  project_id        = "example-project"
  registry_location = "europe"
}

run "workers_read_the_secrets_of_their_classes" {
  command = plan

  variables {
    outside = { abroad = { issuer = "https://k8s.example.com", models = ["caller"] } }
  }

  assert {
    condition = jsonencode(sort([
      for place, right in google_secret_manager_secret_iam_member.classes :
      "${split("/", place)[0]}/${split("/", place)[1]} reads ${right.project}/${right.secret_id}"
      ])) == jsonencode(sort([
      "both/gke reads p/s",
      "caller-canary/abroad reads another-project/keys",
      "caller-canary/abroad reads example-project/hub",
      "caller-canary/gke reads another-project/keys",
      "caller-canary/gke reads example-project/hub",
      "caller/abroad reads another-project/keys",
      "caller/abroad reads example-project/hub",
      "caller/gke reads another-project/keys",
      "caller/gke reads example-project/hub",
    ]))
    error_message = "Each worker reads each secret of Secret Manager that its classes get, once, and no other."
  }

  assert {
    condition = alltrue([
      for right in google_secret_manager_secret_iam_member.classes : right.role == "roles/secretmanager.secretAccessor"
    ])
    error_message = "They may read versions and nothing else."
  }
}

run "cloud_run_gets_the_content_of_interface_files" {
  command = plan

  assert {
    condition = jsonencode([
      for entry in yamldecode(google_secret_manager_secret_version.files["models"].secret_data).models :
      try(entry.interface.sources_sha256, entry.image.interface.sources_sha256, "none")
    ]) == jsonencode(["of the file", "of the file", "inline", "none", "of the file"])
    error_message = "Only the catalog is mounted, so it contains the files that its entries name."
  }

  assert {
    condition = jsonencode([
      for entry in yamldecode(google_secret_manager_secret_version.files["models"].secret_data).models :
      merge(entry, { interface = null, image = null })
      ]) == jsonencode([
      for entry in yamldecode(file("tests/classes.models.yaml")).models : merge(entry, { interface = null, image = null })
    ])
    error_message = "Everything else in the catalog stays the same."
  }
}
