# Against a stand-in of the provider: make terraform-check. objects.yaml is
# what infra/kubernetes makes of models.yaml here; tests/infra/deploy says so
# and how to render it again.

variables {
  cluster      = "penstock-europe-west4"
  models_file  = "tests/models.yaml"
  objects_file = "tests/objects.yaml"
  project_id   = "example-project"
  region       = "europe-west4"
}

run "deployment_per_model" {
  command = plan

  assert {
    condition = output.workers == {
      answers   = "worker-q-and-a"
      pictures  = "worker-pictures"
      questions = "worker-q-and-a"
      sentences = "worker-sentences"
    }
    error_message = "Every model of the catalog has its workers."
  }

  assert {
    condition     = length(setsubtract(values(output.workers), output.objects["Deployment"])) == 0
    error_message = "Every worker is a Deployment."
  }

  assert {
    condition     = toset(output.objects["ScaledObject"]) == toset(values(output.workers)) && toset(output.objects["PodDisruptionBudget"]) == toset(values(output.workers))
    error_message = "Each has its autoscaler and its disruption budget."
  }

  assert {
    condition     = toset(output.objects["PriorityClass"]) == toset(["penstock-default", "penstock-high", "penstock-low"])
    error_message = "Workers go before balloons."
  }
}

run "keda_first" {
  command = plan

  assert {
    condition     = helm_release.keda["keda"].atomic && helm_release.keda["keda"].version == var.keda.version
    error_message = "KEDA brings the CRDs that the workers' release uses."
  }

  assert {
    condition     = length(yamldecode(helm_release.workers.values[0]).objects) == length(flatten(values(output.objects)))
    error_message = "The release holds all that was rendered."
  }
}

run "rendered_from_another_catalog" {
  command = plan

  variables {
    models_file = "../../../models.yaml"
  }

  expect_failures = [helm_release.workers]
}

run "rendered_for_another_region" {
  command = plan

  variables {
    region = "europe-west1"
  }

  expect_failures = [helm_release.workers]
}

run "not_rendered" {
  command = plan

  variables {
    objects_file = "tests/nothing.yaml"
  }

  expect_failures = [var.objects_file]
}

run "keda_too_old" {
  command = plan

  variables {
    keda = { version = "2.20.1" }
  }

  expect_failures = [var.keda]
}
