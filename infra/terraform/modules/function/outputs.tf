output "audience" {
  description = "What a caller's tokens must be made for."
  value       = local.audience
}

output "invoker_email" {
  description = "Account that calls the function."
  value       = google_service_account.invoker.email
  depends_on  = [google_cloud_run_v2_service_iam_member.invoker]
}

output "url" {
  description = "Where the function answers."
  value       = google_cloud_run_v2_service.default.uri
}
