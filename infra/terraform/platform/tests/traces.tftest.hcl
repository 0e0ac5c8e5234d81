# Where spans go; what each process is given stands in tests/infra/deploy too.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  api               = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1 }
  inboxes           = { per_region = 2, slots = 2 }
}

run "nowhere_unless_asked" {
  command = plan

  assert {
    condition     = length(output.deployments["europe-west4"].traces) == 0 && length(google_project_iam_member.traces) == 0
    error_message = "Without an endpoint nothing is set and nobody may write spans."
  }
}

run "to_google" {
  command = plan

  variables {
    traces = { endpoint = "https://telemetry.googleapis.com" }
  }

  assert {
    condition = output.deployments["europe-west4"].traces == tomap({
      OTEL_EXPORTER_OTLP_ENDPOINT                               = "https://telemetry.googleapis.com"
      OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER = "gcp_http_credentials"
    })
    error_message = "Workers send to Google as themselves, and follow the API's decision."
  }

  assert {
    condition     = toset(keys(google_project_iam_member.traces)) == toset(["api", "workers"])
    error_message = "Who makes spans may write them."
  }
}

run "to_a_collector_in_the_cluster" {
  command = plan

  variables {
    traces = {
      endpoint         = "https://collector.example.com"
      workers_endpoint = "http://opentelemetry-collector.gke-managed-otel.svc.cluster.local:4318"
    }
  }

  assert {
    condition     = output.deployments["europe-west4"].traces == tomap({ OTEL_EXPORTER_OTLP_ENDPOINT = "http://opentelemetry-collector.gke-managed-otel.svc.cluster.local:4318" })
    error_message = "Workers have a collector of their own."
  }

  assert {
    condition     = length(google_project_iam_member.traces) == 0 && !contains(keys(google_project_service.default), "telemetry")
    error_message = "Google's API is not asked."
  }
}
