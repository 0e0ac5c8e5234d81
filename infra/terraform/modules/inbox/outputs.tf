output "direct_topic_id" {
  description = "The reply topic without slots."
  value       = google_pubsub_topic.direct.name
}

output "slots" {
  description = "The slots' subscriptions."
  value       = [for slot in google_pubsub_subscription.slots : slot.name]
}

output "topic_id" {
  description = "The reply topic with slots."
  value       = google_pubsub_topic.default.name
  depends_on = [
    google_pubsub_subscription_iam_member.api_pulls, google_pubsub_subscription_iam_member.api_pulls_direct
  ]
}
