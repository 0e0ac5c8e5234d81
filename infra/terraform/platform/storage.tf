# Large inputs and results, and weights. No bucket can be made public.

module "objects" {
  source = "../modules/bucket"

  project_id          = var.project_id
  name                = "${var.project_id}-${var.prefix}-objects"
  location            = var.storage_location
  labels              = var.labels
  deletion_protection = var.deletion_protection
  aborts_uploads      = true # batches/ is written in parts
  soft_delete_days    = 0

  # Each folder outlives what points into it: see objects_days.
  deleted = [for folder, days in local.options.objects_days : { days = days, folders = [folder] }]

  # A put of the same content writes over it, which takes the right to delete.
  members = { for name, member in local.repliers : name => { member = member, role = "roles/storage.objectUser" } }

  depends_on = [google_project_service.default]
}

module "weights" {
  source = "../modules/bucket"

  project_id          = var.project_id
  name                = "${var.project_id}-${var.prefix}-weights"
  location            = var.storage_location
  labels              = var.labels
  deletion_protection = var.deletion_protection
  versioning          = true

  # Kernels of a GPU, a driver or a torch that nobody has any more. Those that
  # are in use are compiled again, once.
  deleted = [{ days = 90, folders = ["kernels"] }, { folders = ["kernels"], noncurrent_days = 1 }]

  members = {
    for name, member in merge({ gke = local.workers_member }, local.outside_members) :
    name => { member = member, role = "roles/storage.objectViewer" }
  }

  depends_on = [google_project_service.default]
}

# What a model's workers compile, for those of them that start later. It is code
# that they run: nobody else may write it.
resource "google_storage_bucket_iam_member" "kernels" {
  for_each = {
    for name, model in local.models : name => model.slug
    if local.options.weights.prefetched && model.compiles && startswith(model.source, "hf:")
  }

  bucket = module.weights.name
  role   = "roles/storage.objectUser"
  member = local._worker_members[each.key].gke

  condition {
    title      = "kernels of ${each.value}"
    expression = "resource.name.startsWith(\"projects/_/buckets/${module.weights.name}/objects/kernels/${each.value}/\")"
  }
}
