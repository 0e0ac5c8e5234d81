# Large inputs and results, and weights. No bucket can be made public.

resource "google_storage_bucket" "objects" {
  project                     = var.project_id
  name                        = "${var.project_id}-${var.prefix}-objects"
  location                    = var.storage_location
  labels                      = var.labels
  force_destroy               = !var.deletion_protection
  public_access_prevention    = "enforced"
  uniform_bucket_level_access = true

  # Each folder outlives what points into it: see objects_days.
  dynamic "lifecycle_rule" {
    for_each = { for folder, days in module.options.objects_days : folder => days }

    content {
      action {
        type = "Delete"
      }

      condition {
        age            = lifecycle_rule.value
        matches_prefix = ["${lifecycle_rule.key}/"]
      }
    }
  }

  # What an upload left that broke off: batches/ is written in parts.
  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }

    condition {
      age = 1
    }
  }

  soft_delete_policy {
    retention_duration_seconds = 0
  }

  # checkov:skip=CKV_GCP_62: results are written and read a hundred times a second; access logs would cost more than they
  # checkov:skip=CKV_GCP_78: an object's name is its content: it never changes, so there is no earlier version
  depends_on = [google_project_service.default]
}

resource "google_storage_bucket" "weights" {
  project                     = var.project_id
  name                        = "${var.project_id}-${var.prefix}-weights"
  location                    = var.storage_location
  labels                      = var.labels
  force_destroy               = !var.deletion_protection
  public_access_prevention    = "enforced"
  uniform_bucket_level_access = true

  versioning {
    enabled = true
  }

  # Kernels of a GPU, a driver or a torch that nobody has any more. Those that
  # are in use are compiled again, once.
  lifecycle_rule {
    action {
      type = "Delete"
    }

    condition {
      age            = 90
      matches_prefix = ["kernels/"]
    }
  }

  lifecycle_rule {
    action {
      type = "Delete"
    }

    condition {
      days_since_noncurrent_time = 1
      matches_prefix             = ["kernels/"]
      with_state                 = "ARCHIVED"
    }
  }

  # checkov:skip=CKV_GCP_62: read by workers at their start only; Cloud Audit Logs say who wrote
  depends_on = [google_project_service.default]
}

# A put of the same content writes over it, which takes the right to delete.
resource "google_storage_bucket_iam_member" "objects" {
  for_each = local.repliers

  bucket = google_storage_bucket.objects.name
  role   = "roles/storage.objectUser"
  member = each.value
}

resource "google_storage_bucket_iam_member" "weights" {
  for_each = merge({ gke = local.workers_member }, local.outside_members)

  bucket = google_storage_bucket.weights.name
  role   = "roles/storage.objectViewer"
  member = each.value
}

# What a model's workers compile, for those of them that start later. It is code
# that they run: nobody else may write it.
resource "google_storage_bucket_iam_member" "kernels" {
  for_each = {
    for name, model in local.models : name => model.slug
    if module.options.weights.prefetched && model.compiles && startswith(model.source, "hf:")
  }

  bucket = google_storage_bucket.weights.name
  role   = "roles/storage.objectUser"
  member = local._worker_members[each.key].gke

  condition {
    title      = "kernels of ${each.value}"
    expression = "resource.name.startsWith(\"projects/_/buckets/${google_storage_bucket.weights.name}/objects/kernels/${each.value}/\")"
  }
}
