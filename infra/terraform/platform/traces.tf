# Where spans go, and the right to write them. Without an endpoint none are
# made. The names of the variables are OpenTelemetry's own.

locals {
  # Google's Telemetry API takes OTLP from those who may, and stores traces
  # where the Trace API is on.
  _google_traces = "https://telemetry.googleapis.com"
  _trace_endpoints = {
    api     = local.options.traces.endpoint
    outside = local.options.traces.endpoint
    workers = local.options.traces.workers_endpoint == null ? local.options.traces.endpoint : local.options.traces.workers_endpoint
  }
  trace_services = contains(values(local._trace_endpoints), local._google_traces) ? ["cloudtrace", "telemetry"] : []
  trace_settings = {
    for name, endpoint in local._trace_endpoints : name => endpoint == null ? {} : merge(
      { OTEL_EXPORTER_OTLP_ENDPOINT = endpoint },
      endpoint != local._google_traces ? {} : {
        OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER = "gcp_http_credentials"
      },
    )
  }
  # The API decides which traces are kept. All others follow it.
  trace_sampling = local.options.traces.endpoint == null ? {} : {
    OTEL_TRACES_SAMPLER     = local.options.traces.sampler
    OTEL_TRACES_SAMPLER_ARG = tostring(local.options.traces.ratio)
  }
  _tracers = merge(
    local._trace_endpoints.api != local._google_traces ? {} : merge(
      { api = google_service_account.api.member },
      { for name, account in google_service_account.functions : name => account.member },
      { for name, member in local.outside_members : "outside-${name}" => member },
    ),
    local._trace_endpoints.workers != local._google_traces ? {} : { workers = local.workers_member },
  )
}

# Spans can only be written to the project as a whole.
resource "google_project_iam_member" "traces" {
  for_each = local._tracers

  project = var.project_id
  role    = "roles/telemetry.tracesWriter"
  member  = each.value
}
