run "plans" {
  command = plan

  variables {
    api_image         = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0"
    project_id        = "example-project"
    registry_location = "europe"
  }

  assert {
    condition     = keys(output.deployments) == ["europe-west4"] && output.platform.address == null
    error_message = "One region and no balancer."
  }
}

run "before_the_first_image" {
  command = plan

  variables {
    project_id        = "example-project"
    registry_location = "europe"
  }

  assert {
    condition     = output.platform.api_urls["europe-west4"] == null
    error_message = "The first apply makes all but the API."
  }
}
