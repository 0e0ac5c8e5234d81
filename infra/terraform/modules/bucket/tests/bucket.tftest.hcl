# Against a stand-in of the provider: make terraform-check.

variables {
  project_id = "example-project"
  location   = "EU"
  name       = "example-project-things"
}

run "nobody_by_default" {
  command = plan

  assert {
    condition     = google_storage_bucket.default.public_access_prevention == "enforced" && google_storage_bucket.default.uniform_bucket_level_access && !google_storage_bucket.default.force_destroy
    error_message = "It can't be made public, and is not deleted with what is in it."
  }

  assert {
    condition     = length(google_storage_bucket.default.lifecycle_rule) == 0 && length(google_storage_bucket_iam_member.default) == 0
    error_message = "Nothing is deleted, and nobody may do anything."
  }
}

run "what_is_deleted_and_who_may" {
  command = plan

  variables {
    aborts_uploads   = true
    deleted          = [{ days = 8, folders = ["inputs"] }, { folders = ["kernels"], noncurrent_days = 1 }]
    soft_delete_days = 7
    versioning       = true
    members = {
      all  = { member = "serviceAccount:a@b.c", role = "roles/storage.objectViewer" }
      some = { folder = "incoming", member = "serviceAccount:d@e.f", role = "roles/storage.objectCreator", title = "incoming things" }
    }
  }

  assert {
    condition = [
      for rule in google_storage_bucket.default.lifecycle_rule : "${one(rule.action).type} ${try(join(",", one(rule.condition).matches_prefix), "")}"
    ] == ["Delete inputs/", "Delete kernels/", "AbortIncompleteMultipartUpload "]
    error_message = "Each folder has its own end."
  }

  assert {
    condition     = google_storage_bucket.default.soft_delete_policy[0].retention_duration_seconds == 604800 && google_storage_bucket.default.versioning[0].enabled
    error_message = "What was deleted by mistake can be brought back."
  }

  assert {
    condition     = length(google_storage_bucket_iam_member.default["all"].condition) == 0 && endswith(google_storage_bucket_iam_member.default["some"].condition[0].expression, "/objects/incoming/\")")
    error_message = "Some may something in one folder only."
  }
}
