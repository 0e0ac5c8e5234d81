# Views of a tenant's rows, against a stand-in of the provider: make terraform-check.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  api               = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1 }
  inboxes           = { per_region = 2, slots = 2 }
}

run "none_by_default" {
  command = plan

  assert {
    condition     = length(google_bigquery_dataset.tenants) == 0 && length(google_bigquery_dataset_access.tenants) == 0
    error_message = "Nobody outside reads rows."
  }
}

run "a_data_set_for_each_tenant" {
  command = plan

  variables {
    analysts = {
      acme       = { members = ["group:analysts@acme.example"] }
      "Globex-2" = { members = ["user:eve@globex.example", "serviceAccount:grafana@globex.iam.gserviceaccount.com"] }
    }
  }

  assert {
    condition     = local.tenant_datasets == { acme = "penstock_tenant_acme", "Globex-2" = "penstock_tenant_globex_2" }
    error_message = "It is named after the tenant."
  }

  assert {
    condition = toset([for view in google_bigquery_table.tenant_views : view.table_id if view.dataset_id == "penstock_tenant_acme"]) == toset([
      "costs_daily", "latency_hourly", "rows", "usage_hourly"
    ])
    error_message = "Nothing of workers, GPUs or other tenants is there."
  }

  assert {
    condition = alltrue([
      for key, view in google_bigquery_table.tenant_views :
      strcontains(view.view[0].query, "WHERE tenant = '${split(" ", key)[0]}'") && !strcontains(view.view[0].query, "WHERE TRUE")
    ])
    error_message = "Each view has the rows of its tenant only."
  }

  assert {
    condition = { for key, member in google_bigquery_dataset_iam_member.analysts : key => member.dataset_id } == {
      "Globex-2 serviceAccount:grafana@globex.iam.gserviceaccount.com" = "penstock_tenant_globex_2"
      "Globex-2 user:eve@globex.example"                               = "penstock_tenant_globex_2"
      "acme group:analysts@acme.example"                               = "penstock_tenant_acme"
    }
    error_message = "Analysts read the data set of their tenant, and no other."
  }

  assert {
    condition = alltrue([
      for access in google_bigquery_dataset_access.tenants :
      access.dataset_id == "penstock" && access.dataset[0].target_types == tolist(["VIEWS"])
    ]) && length(google_bigquery_dataset_access.tenants) == 2
    error_message = "The views may read the rows, their readers may not."
  }
}

