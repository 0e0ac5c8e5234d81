output "namespace" {
  description = "Namespace of the workers."
  value       = local.namespace
  depends_on  = [helm_release.workers]
}

output "objects" {
  description = "Names of the applied objects, by kind."
  value       = local.kinds
}

output "workers" {
  description = "Deployment of each model's workers."
  value       = { for model, slug in local.workers : model => "worker-${slug}" }
}
