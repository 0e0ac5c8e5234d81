run "plans" {
  command = plan

  variables {
    api_image         = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0"
    domain            = "api.example.com"
    project_id        = "example-project"
    registry_location = "europe"
  }

  assert {
    condition     = keys(output.deployments) == ["europe-west1", "europe-west4"] && length(output.platform.clusters) == 2
    error_message = "Two of everything that is regional."
  }

  assert {
    condition     = length(distinct(values(output.platform.api_urls))) == 1
    error_message = "One address for both."
  }
}
