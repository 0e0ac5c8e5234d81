# A bucket that nobody can make public, what is deleted in it and when, and who
# may do what in it.

resource "google_storage_bucket" "default" {
  project                     = var.project_id
  name                        = var.name
  location                    = var.location
  labels                      = var.labels
  force_destroy               = !var.deletion_protection
  public_access_prevention    = "enforced"
  uniform_bucket_level_access = true

  dynamic "versioning" {
    for_each = var.versioning ? [true] : []

    content {
      enabled = true
    }
  }

  dynamic "lifecycle_rule" {
    for_each = var.deleted

    content {
      action {
        type = "Delete"
      }

      condition {
        age                        = lifecycle_rule.value.days
        days_since_noncurrent_time = lifecycle_rule.value.noncurrent_days
        matches_prefix             = [for folder in lifecycle_rule.value.folders : "${folder}/"]
        with_state                 = lifecycle_rule.value.noncurrent_days == null ? null : "ARCHIVED"
      }
    }
  }

  # What an upload left that broke off.
  dynamic "lifecycle_rule" {
    for_each = var.aborts_uploads ? [1] : []

    content {
      action {
        type = "AbortIncompleteMultipartUpload"
      }

      condition {
        age = lifecycle_rule.value
      }
    }
  }

  dynamic "soft_delete_policy" {
    for_each = var.soft_delete_days == null ? [] : [var.soft_delete_days]

    content {
      retention_duration_seconds = soft_delete_policy.value * 86400
    }
  }

  # checkov:skip=CKV_GCP_62: Cloud Audit Logs say who read and wrote; access logs of what is written a hundred times a second would cost more than it
  # checkov:skip=CKV_GCP_78: names are never used again, but where versioning is on
}

resource "google_storage_bucket_iam_member" "default" {
  for_each = var.members

  bucket = google_storage_bucket.default.name
  role   = each.value.role
  member = each.value.member

  dynamic "condition" {
    for_each = each.value.folder == null ? {} : { (each.value.title) = each.value.folder }

    content {
      title      = condition.key
      expression = "resource.name.startsWith(\"projects/_/buckets/${google_storage_bucket.default.name}/objects/${condition.value}/\")"
    }
  }
}
