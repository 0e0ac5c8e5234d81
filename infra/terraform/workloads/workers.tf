# What Kustomize rendered for this region, as one release. Its objects are not
# known to Terraform one by one: so the first plan needs no CRD that KEDA has
# yet to bring, and what leaves models.yaml leaves the cluster.

locals {
  documents = [
    for document in split("\n---\n", file(var.objects_file)) : yamldecode(document) if trimspace(document) != ""
  ]
  kinds = { for kind in distinct(local.documents[*].kind) : kind => [for object in local.documents : object.metadata.name if object.kind == kind] }
  models = toset(flatten([
    for entry in yamldecode(file(local.models_path)).models :
    try(entry.canary, null) == null ? [entry.name] : [entry.name, "${entry.name}.canary"]
  ]))
  uses_keda = contains(keys(local.kinds), "ScaledObject")
  # A worker may serve several models.
  workers = merge([
    for object in local.documents : {
      for model in split(",", object.data.PENSTOCK_MODEL) : model => object.metadata.labels["penstock.dev/model"]
    } if object.kind == "ConfigMap" && try(object.data.PENSTOCK_MODEL, null) != null
  ]...)

  models_path = var.models_file == null ? "${path.module}/../../../models.yaml" : var.models_file
  namespace   = one([for object in local.documents : object.metadata.name if object.kind == "Namespace"])
  regions = distinct([
    for object in local.documents : object.data.PENSTOCK_REGION
    if object.kind == "ConfigMap" && try(object.data.PENSTOCK_REGION, null) != null
  ])
}

resource "helm_release" "workers" {
  name        = "penstock-workers"
  chart       = "${path.module}/../../kubernetes/chart"
  max_history = 10
  timeout     = 1800
  # Helm's own record of the release. The namespace of the workers is one of
  # the objects, with its labels, so the record can't stand in it.
  namespace = "default"
  # Off: a worker that scales from zero, or waits for a GPU, is no failure.
  wait = var.wait_for_workers

  values = [yamlencode({ objects = local.documents })]

  lifecycle {
    precondition {
      condition     = local.models == toset(keys(local.workers))
      error_message = "${var.objects_file} was not rendered from this models.yaml; render it again (python -m infra.kubernetes)."
    }

    precondition {
      condition     = length(local.regions) == 1 && local.regions[0] == var.region
      error_message = "${var.objects_file} was rendered for ${join(", ", local.regions)}, not for ${var.region}."
    }
  }

  depends_on = [helm_release.keda]
}
