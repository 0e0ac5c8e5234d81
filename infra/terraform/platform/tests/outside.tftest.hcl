# Against a stand-in of the provider: make terraform-check.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  api               = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1 }
  inboxes           = { per_region = 2, slots = 2 }
}

run "a_cluster_outside" {
  command = plan

  variables {
    outside = {
      elsewhere = { issuer = "https://oidc.example.com/1", models = ["all-MiniLM-L6-v2"], redis_cidr = "10.200.0.0/24", redis_url = "redis://10.200.0.5:6379/0" }
    }
  }

  override_module {
    target  = module.redis
    outputs = { url = "redis://10.64.32.2:6379/0" }
  }

  assert {
    condition = google_iam_workload_identity_pool_provider.outside["elsewhere"].oidc[0].issuer_uri == "https://oidc.example.com/1" && (
      google_iam_workload_identity_pool_provider.outside["elsewhere"].attribute_condition == "assertion.sub.startsWith('system:serviceaccount:penstock:worker-')"
    )
    error_message = "Only tokens of workers are taken."
  }

  assert {
    condition = {
      for name, role in module.objects.members : name => role.member if startswith(name, "outside-")
    } == { outside-elsewhere = "principalSet://iam.googleapis.com/projects/123456789012/locations/global/workloadIdentityPools/penstock-elsewhere/attribute.namespace/penstock" }
    error_message = "They write what workers write."
  }

  assert {
    condition = output.outside["elsewhere"].audience == "//iam.googleapis.com/projects/123456789012/locations/global/workloadIdentityPools/penstock-elsewhere/providers/cluster" && (
      output.outside["elsewhere"].records_url == "redis://10.64.32.2:6379/0" && output.outside["elsewhere"].redis_url == "redis://10.200.0.5:6379/0"
    ) && output.outside["elsewhere"].redis_cidrs == tolist(["10.64.32.0/20", "10.200.0.0/24"])
    error_message = "They cache there, and keep the records with all others."
  }
}

run "nothing_outside_by_default" {
  command = plan

  assert {
    condition     = length(google_iam_workload_identity_pool.outside) == 0 && length(output.outside) == 0
    error_message = "Nobody outside is let in unasked."
  }
}
