# What Terraform makes up never lands in its state: raise secrets_version to
# have new ones, and apply.

ephemeral "random_password" "links" {
  length  = 48
  special = false
}

ephemeral "random_password" "webhooks" {
  length  = 32
  special = false
}

locals {
  # Cloud Run mounts the catalog alone, so it gets the content of the interface
  # files that entries name.
  _interface_files = toset(compact(flatten([
    for entry in local._entries : [try(tostring(entry.interface), ""), try(tostring(entry.image.interface), "")]
  ])))
  _interfaces = {
    for path in local._interface_files : path => jsondecode(file("${dirname(local.models_file)}/${path}"))
  }
  _whole_catalog = merge(yamldecode(file(local.models_file)), {
    models = [
      for entry in local._entries : merge(
        entry,
        { for key, value in entry : key => local._interfaces[value] if key == "interface" && contains(local._interface_files, try(tostring(value), "")) },
        { for key, value in entry : key => merge(value, { interface = local._interfaces[value.interface] }) if key == "image" && contains(local._interface_files, try(tostring(value.interface), "")) },
      )
    ]
  })
  # The catalog and the scraping are no secrets, but Cloud Run mounts
  # files from nowhere else.
  _files = {
    # JSON is YAML too, and shorter than what yamlencode writes.
    models = length(local._interface_files) == 0 ? file(local.models_file) : jsonencode(local._whole_catalog)
    scraping = yamlencode({
      apiVersion = "monitoring.googleapis.com/v1beta"
      kind       = "RunMonitoring"
      metadata   = { name = "penstock-api" }
      spec       = { endpoints = [{ interval = "10s", path = "/metrics", port = 9464 }] }
    })
  }
  secrets = {
    api_keys = { secret = google_secret_manager_secret.default["api-keys"].secret_id, version = "latest" }
    links    = { secret = google_secret_manager_secret.default["links"].secret_id, version = google_secret_manager_secret_version.links.version }
    models   = { secret = google_secret_manager_secret.default["models"].secret_id, version = google_secret_manager_secret_version.files["models"].version }
    scraping = { secret = google_secret_manager_secret.default["scraping"].secret_id, version = google_secret_manager_secret_version.files["scraping"].version }
    webhooks = { secret = google_secret_manager_secret.default["webhooks"].secret_id, version = "latest" }
  }
}

resource "google_secret_manager_secret" "default" {
  for_each = toset(["api-keys", "links", "models", "release-key", "scraping", "webhooks"])

  project   = var.project_id
  secret_id = "${var.prefix}-${each.key}"
  labels    = var.labels

  replication {
    auto {}
  }

  depends_on = [google_project_service.default]
}

# The key for the smoke test of a release is for Cloud Build, not for the API.
resource "google_secret_manager_secret_iam_member" "api" {
  for_each = { for name, secret in google_secret_manager_secret.default : name => secret if name != "release-key" }

  project   = var.project_id
  secret_id = each.value.secret_id
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.api.member
}

# A directory without keys, so that the API starts. Keys are made with
# `penstock keys create` and added as new versions, of which Terraform knows
# nothing. So the API reads the latest, and no key is in Terraform's state.
resource "google_secret_manager_secret_version" "api_keys" {
  secret      = google_secret_manager_secret.default["api-keys"].id
  secret_data = jsonencode({ plans = {}, tenants = {}, keys = [] })
}

resource "google_secret_manager_secret_version" "links" {
  secret                 = google_secret_manager_secret.default["links"].id
  secret_data_wo         = ephemeral.random_password.links.result
  secret_data_wo_version = var.secrets_version
}

# Another one is put before it by hand, as a new version with both in it; so
# API and function read the latest.
resource "google_secret_manager_secret_version" "webhooks" {
  secret                 = google_secret_manager_secret.default["webhooks"].id
  secret_data_wo         = "whsec_${base64encode(ephemeral.random_password.webhooks.result)}"
  secret_data_wo_version = var.secrets_version
}

resource "google_secret_manager_secret_version" "files" {
  for_each = local._files

  secret      = google_secret_manager_secret.default[each.key].id
  secret_data = each.value

  lifecycle {
    # The running revision reads the old version until the new one is ready.
    create_before_destroy = true

    precondition {
      # In base64, because length() counts characters rather than bytes.
      condition     = length(base64encode(each.value)) <= 4 * ceil(65536 / 3)
      error_message = "models_file: the catalog, with the content of its interface files, must be at most 65,536 bytes, because Cloud Run reads it from Secret Manager. Shorten the descriptions of inputs, or remove entries."
    }
  }
}

# A token of the Hugging Face hub. Its value is added by hand, so that it is in
# no state. Workers of hub models read it, each with its own identity.
resource "google_secret_manager_secret" "hub_token" {
  for_each = local.options.weights.hub_token ? { hub-token = true } : {}

  project   = var.project_id
  secret_id = "${var.prefix}-${each.key}"
  labels    = var.labels

  replication {
    auto {}
  }

  depends_on = [google_project_service.default]
}

locals {
  # By the first model of each worker.
  _hub_workers = {
    for worker, names in {
      for name, model in local.models : model.worker => name... if startswith(model.source, "hf:")
    } : names[0] => worker
  }
}

resource "google_secret_manager_secret_iam_member" "hub_token" {
  for_each = local.options.weights.hub_token ? local._hub_workers : {}

  project   = var.project_id
  secret_id = google_secret_manager_secret.hub_token["hub-token"].secret_id
  role      = "roles/secretmanager.secretAccessor"
  member    = "${local.workload_identity}/subject/ns/${var.namespace}/sa/worker-${each.value}"
}
