# The autoscaler and its CRDs, before anything that uses them.

resource "helm_release" "keda" {
  for_each = local.uses_keda ? { keda = var.keda } : {}

  name             = "keda"
  namespace        = "keda"
  create_namespace = true
  repository       = "https://kedacore.github.io/charts"
  chart            = "keda"
  version          = each.value.version
  atomic           = true
  timeout          = 600

  values = [yamlencode({
    crds        = { install = true }
    operator    = { replicaCount = each.value.replicas }
    podIdentity = { gcp = { enabled = true } }
    # Scraped by infra/kubernetes/cluster/pod-monitoring.yaml: an alert says when its reads fail.
    prometheus = { operator = { enabled = true, port = 8080 } }
    # Its metrics server and webhooks hold what every scaling waits for.
    metricsServer = { replicaCount = each.value.replicas }
    resources = {
      operator     = { requests = { cpu = "100m", memory = "128Mi" }, limits = { memory = "512Mi" } }
      metricServer = { requests = { cpu = "100m", memory = "128Mi" }, limits = { memory = "512Mi" } }
      webhooks     = { requests = { cpu = "50m", memory = "64Mi" }, limits = { memory = "128Mi" } }
    }
  })]
}
