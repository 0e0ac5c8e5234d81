run "plans" {
  command = plan

  variables {
    alert_emails      = ["oncall@example.com"]
    billing_account   = "000000-000000-000000"
    domain            = "api.example.com"
    project_id        = "example-project"
    registry_location = "europe"

    images = {
      api          = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0"
      dead_letters = "europe-west4-docker.pkg.dev/p/penstock/functions@sha256:0"
      reports      = "europe-west4-docker.pkg.dev/p/penstock/functions@sha256:0"
      webhooks     = "europe-west4-docker.pkg.dev/p/penstock/functions@sha256:0"
    }
  }

  assert {
    condition     = output.platform.api_urls == { "europe-west4" = "https://api.example.com" }
    error_message = "One region behind its domain."
  }

  assert {
    condition     = output.deployments["europe-west4"].overflow == "a100" && output.deployments["europe-west4"].spot
    error_message = "L4 spot, L4 on demand, then A100."
  }
}
