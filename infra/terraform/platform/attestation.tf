# Nodes run only images of ours that were approved (nodes.binary_authorization):
# after the approval of a release infra/cloudbuild/attest.sh signs its images,
# with a key that the account of the build can't use. Images of others that the
# platform takes are named here.

locals {
  _attested = local.options.nodes.binary_authorization ? { release = true } : {}
  # What a node runs in addition to ours and what Google's own policy admits.
  _others_images = [
    "ghcr.io/kedacore/**",
    "registry.k8s.io/**",
    "us-docker.pkg.dev/cloud-ops-agents-artifacts/**",
  ]
}

resource "google_kms_key_ring" "release" {
  for_each = local._attested

  project  = var.project_id
  location = local.home
  name     = "${var.prefix}-release"

  depends_on = [google_project_service.default]
}

resource "google_kms_crypto_key" "release" {
  for_each = google_kms_key_ring.release

  name     = "approved"
  key_ring = each.value.id
  purpose  = "ASYMMETRIC_SIGN"
  labels   = var.labels

  version_template {
    algorithm        = "EC_SIGN_P256_SHA256"
    protection_level = "SOFTWARE"
  }

  # checkov:skip=CKV_GCP_43: Google rotates no key that signs; a new version is made and named by hand
  # checkov:skip=CKV_GCP_82: a lost key ends no image that runs; attestations are made again
}

data "google_kms_crypto_key_version" "release" {
  for_each = google_kms_crypto_key.release

  crypto_key = each.value.id
}

resource "google_container_analysis_note" "release" {
  for_each = local._attested

  project = var.project_id
  name    = "${var.prefix}-release"

  attestation_authority {
    hint {
      human_readable_name = "Releases that were approved"
    }
  }

  depends_on = [google_project_service.default]
}

resource "google_binary_authorization_attestor" "release" {
  for_each = local._attested

  project = var.project_id
  name    = "${var.prefix}-release"

  attestation_authority_note {
    note_reference = google_container_analysis_note.release[each.key].name

    public_keys {
      id = data.google_kms_crypto_key_version.release[each.key].id

      pkix_public_key {
        public_key_pem      = data.google_kms_crypto_key_version.release[each.key].public_key[0].pem
        signature_algorithm = data.google_kms_crypto_key_version.release[each.key].public_key[0].algorithm
      }
    }
  }
}

resource "google_binary_authorization_policy" "default" {
  for_each = local._attested

  project                       = var.project_id
  global_policy_evaluation_mode = "ENABLE"

  dynamic "admission_whitelist_patterns" {
    for_each = local._others_images

    content {
      name_pattern = admission_whitelist_patterns.value
    }
  }

  default_admission_rule {
    evaluation_mode         = "REQUIRE_ATTESTATION"
    enforcement_mode        = "ENFORCED_BLOCK_AND_AUDIT_LOG"
    require_attestations_by = [google_binary_authorization_attestor.release[each.key].name]
  }
}
