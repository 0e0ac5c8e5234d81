output "topic_id" {
  description = "The reply topic."
  value       = google_pubsub_topic.default.name
  depends_on  = [google_pubsub_subscription_iam_member.api_pulls]
}
