# Against a stand-in of the provider: make terraform-check.

variables {
  project_id        = "example-project"
  prefix            = "penstock"
  region            = "europe-west4"
  cidr              = "10.64.0.0/14"
  network           = "projects/example-project/global/networks/penstock"
  dataset           = "penstock"
  objects_url       = "gs://example-project-penstock-objects"
  records_max_bytes = 1300000000
  records_url       = "redis://10.64.32.9:6379/0"
  redis_url         = "redis://10.68.32.2:6379/0"
  inboxes           = { count = 8, first = 0, slots = 80 }

  api = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", service_account = "api@example-project.iam.gserviceaccount.com" }

  secrets = {
    api_keys = { secret = "penstock-api-keys", version = "latest" }
    links    = { secret = "penstock-links", version = "1" }
    models   = { secret = "penstock-models", version = "1" }
    scraping = { secret = "penstock-scraping", version = "1" }
    webhooks = { secret = "penstock-webhooks", version = "latest" }
  }
}

run "api" {
  command = plan

  assert {
    condition = google_cloud_run_v2_service.api["api"].template[0].containers[0].startup_probe[0].http_get[0].path == "/readyz" && (
      google_cloud_run_v2_service.api["api"].template[0].containers[0].liveness_probe[0].http_get[0].path == "/livez"
    )
    error_message = "An instance serves when a message came back through Pub/Sub, and lives while it answers."
  }

  assert {
    condition = google_cloud_run_v2_service.api["api"].template[0].containers[0].resources[0].cpu_idle == false && (
      google_cloud_run_v2_service.api["api"].template[0].scaling[0].min_instance_count >= 1
    )
    error_message = "Replies come in outside of requests: the CPU stays, and one instance too."
  }

  assert {
    condition     = google_cloud_run_v2_service.api["api"].ingress == "INGRESS_TRAFFIC_ALL" && length(google_compute_region_network_endpoint_group.api) == 0
    error_message = "Without a balancer the API answers on its own address."
  }

  assert {
    condition = alltrue([
      for env in google_cloud_run_v2_service.api["api"].template[0].containers[0].env :
      contains(["PENSTOCK_SECRET", "PENSTOCK_WEBHOOK_SECRETS"], env.name) == (length(env.value_source) == 1)
    ])
    error_message = "Secrets come from Secret Manager and nothing else does."
  }

  assert {
    condition = [for port in google_cloud_run_v2_service.api["api"].template[0].containers[0].ports : port.container_port] == [8080] && (
      output.environment["PENSTOCK_PORT"] == "8080"
    ) && output.environment["PENSTOCK_METRICS_PORT"] == "9464" && !contains(keys(output.environment), "PENSTOCK_METRICS_HOST")
    error_message = "Metrics are on localhost, for the sidecar: only the port that a container names can be called."
  }

  assert {
    condition = one([
      for volume in google_cloud_run_v2_service.api["api"].template[0].volumes : volume.secret[0].items[0].version if volume.name == "keys"
    ]) == "latest"
    error_message = "Keys are read from the latest version, so that one can be revoked without an apply."
  }
}

run "behind_the_balancer" {
  command = plan

  variables {
    api = {
      behind_balancer = true
      image           = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0"
      service_account = "api@example-project.iam.gserviceaccount.com"
    }
  }

  assert {
    condition = google_cloud_run_v2_service.api["api"].ingress == "INGRESS_TRAFFIC_INTERNAL_LOAD_BALANCER" && (
      google_cloud_run_v2_service.api["api"].default_uri_disabled
    )
    error_message = "Nobody gets past Cloud Armor."
  }

  assert {
    condition     = google_compute_region_network_endpoint_group.api["api"].network_endpoint_type == "SERVERLESS"
    error_message = "The balancer finds the region's API."
  }
}

run "before_the_first_image" {
  command = plan

  variables {
    api = { service_account = "api@example-project.iam.gserviceaccount.com" }
  }

  assert {
    condition     = length(google_cloud_run_v2_service.api) == 0
    error_message = "The first apply makes the registry that the image is pushed to."
  }
}

run "two_redis" {
  command = plan

  assert {
    condition     = output.environment["PENSTOCK_RECORDS_URL"] == var.records_url && output.environment["PENSTOCK_REDIS_URL"] == var.redis_url
    error_message = "Records are where all regions have them; cache and leases are the region's."
  }
}

run "keys_in_a_file" {
  command = plan

  assert {
    condition     = output.environment["PENSTOCK_KEYS_URL"] == "file:///etc/penstock-keys/keys.json"
    error_message = "Keys are read from the mounted secret."
  }
}

run "keys_in_redis" {
  command = plan

  variables {
    api = {
      image           = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0"
      keys_in_redis   = true
      service_account = "api@example-project.iam.gserviceaccount.com"
    }
  }

  assert {
    condition     = output.environment["PENSTOCK_KEYS_URL"] == var.records_url
    error_message = "All regions have the same keys: those of the records' Redis."
  }
}

run "budgets_of_the_records" {
  command = plan

  assert {
    condition     = output.environment["PENSTOCK_ANSWERS_MAX_BYTES"] == "1300000000" && output.environment["PENSTOCK_PREDICTIONS_MAX_BYTES"] == "1300000000"
    error_message = "Neither answers nor predictions may fill the Redis that has them."
  }
}

run "ranges_do_not_meet" {
  command = plan

  assert {
    condition = google_compute_subnetwork.nodes.ip_cidr_range == "10.64.0.0/20" && (
      google_compute_subnetwork.nodes.secondary_ip_range[0].ip_cidr_range == "10.66.0.0/15"
    )
    error_message = "Nodes and pods have blocks of their own."
  }
}

run "no_instance" {
  command = plan

  variables {
    api = { min_instances = 0, service_account = "api@example-project.iam.gserviceaccount.com" }
  }

  expect_failures = [var.api]
}
