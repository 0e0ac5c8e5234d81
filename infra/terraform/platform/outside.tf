# Clusters outside Google whose workers pull the same jobs. Each has a pool of
# its own, since two clusters may give the same name to a service account; who
# holds a token of such an account is let in, and no key exists.

locals {
  outside_members = {
    for name, cluster in local.options.outside :
    name => "principalSet://${local.outside_pools[name]}/attribute.namespace/${cluster.namespace}"
  }
  outside_pools = {
    for name, pool in google_iam_workload_identity_pool.outside :
    name => "iam.googleapis.com/projects/${local._number}/locations/global/workloadIdentityPools/${pool.workload_identity_pool_id}"
  }
}

resource "google_iam_workload_identity_pool" "outside" {
  for_each = local.options.outside

  project                   = var.project_id
  workload_identity_pool_id = "${var.prefix}-${each.key}"
  display_name              = "Workers in ${each.key}"

  depends_on = [google_project_service.default]
}

resource "google_iam_workload_identity_pool_provider" "outside" {
  for_each = local.options.outside

  project                            = var.project_id
  workload_identity_pool_id          = google_iam_workload_identity_pool.outside[each.key].workload_identity_pool_id
  workload_identity_pool_provider_id = "cluster"
  attribute_condition                = "assertion.sub.startsWith('system:serviceaccount:${each.value.namespace}:worker-')"

  attribute_mapping = {
    "attribute.namespace" = "assertion['kubernetes.io']['namespace']"
    "google.subject"      = "assertion.sub"
  }

  # The audience is the provider itself, as long as no other is named.
  oidc {
    issuer_uri = each.value.issuer
    jwks_json  = each.value.jwks_json
  }
}
