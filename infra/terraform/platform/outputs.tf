output "address" {
  description = "Address of the load balancer, for the domain's A record; null without a domain."
  value       = one([for address in google_compute_global_address.api : address.address])
}

output "api_keys_secret" {
  description = "Secret with the directory of API keys, tenants, and plans (docs/how-to/keys.md)."
  value       = google_secret_manager_secret.default["api-keys"].secret_id
}

output "api_urls" {
  description = "API URL by region. With a domain, they are all the same."
  value = {
    for name, region in module.region :
    name => var.domain == null ? region.api.uri : "https://${var.domain}"
  }
}

output "attestor" {
  description = "Attestor that approves images (nodes.binary_authorization); null: nodes don't require an attestation."
  value       = one([for attestor in google_binary_authorization_attestor.release : attestor.id])
}

output "attestor_key" {
  description = "Key version that the attestor signs with."
  value       = one([for key in data.google_kms_crypto_key_version.release : key.name])
}

output "clusters" {
  description = "Cluster name by region."
  value       = { for name, cluster in module.cluster : name => cluster.name }
}

output "deployments" {
  description = "Input for rendering each region's worker manifests, read by infra/kubernetes/overlay.py."
  value = {
    for name, region in local.options.regions : name => {
      compute_classes = local.options.nodes.compute_classes
      dataset         = google_bigquery_dataset.default.dataset_id
      hub_token       = one([for secret in google_secret_manager_secret.hub_token : secret.secret_id])
      namespace       = var.namespace
      objects_url     = "gs://${module.objects.name}"
      overflow        = local.overflow[name]
      project         = var.project_id
      records_url     = local.records_url
      redis_cidrs     = distinct([local.redis_cidrs[name], local.redis_cidrs[local.home]])
      redis_url       = module.redis[name].url
      region          = name
      reservations    = region.reservations
      rows_url        = local.rows_url
      spot            = local.options.nodes.spot
      traces          = local.trace_settings.workers
      weights_bucket  = local.options.weights.prefetched ? module.weights.name : null
      zones           = region.zones
    }
  }
}

output "outside" {
  description = "Like deployments, for clusters outside Google. Includes the audience of their workers' tokens."
  value = {
    for name, cluster in local.options.outside : name => {
      audience        = "//${local.outside_pools[name]}/providers/${google_iam_workload_identity_pool_provider.outside[name].workload_identity_pool_provider_id}"
      compute_classes = false
      dataset         = google_bigquery_dataset.default.dataset_id
      models          = cluster.models
      namespace       = cluster.namespace
      objects_url     = "gs://${module.objects.name}"
      overflow        = null
      project         = var.project_id
      records_url     = local.records_url
      redis_cidrs     = distinct(compact([local.redis_cidrs[local.home], cluster.redis_cidr]))
      redis_url       = coalesce(cluster.redis_url, module.redis[local.home].url)
      region          = name
      rows_url        = local.rows_url
      spot            = false
      traces          = local.trace_settings.outside
    }
  }
}

output "registry" {
  description = "Image registry."
  value       = "${google_artifact_registry_repository.default.location}-docker.pkg.dev/${var.project_id}/${google_artifact_registry_repository.default.repository_id}"
}

output "topics" {
  description = "Each model's topic, subscriptions, and dead-letter topic."
  value = {
    for name, model in module.model : name => {
      batch_subscription_id   = model.batch_subscription_id
      dead_letter_topic_id    = model.dead_letter_topic_id
      topic_id                = model.topic_id
      workers_subscription_id = model.workers_subscription_id
    }
  }
}

output "weights_bucket" {
  description = "Bucket for weights. A source in models.yaml refers to it as gs://BUCKET/PREFIX."
  value       = module.weights.name
}

output "worker_accounts" {
  description = "Kubernetes service account of each model's workers, in the namespace `namespace`."
  value       = { for name, model in local.models : name => "worker-${model.worker}" }
}
