output "batch_subscription_id" {
  description = "The batch subscription, which the model's workers also pull: jobs that may wait."
  value       = google_pubsub_subscription.batch.name
  depends_on  = [google_pubsub_subscription_iam_member.workers_pull_batch]
}

output "dead_letter_topic_id" {
  description = "Topic for jobs that no worker could finish."
  value       = google_pubsub_topic.dead.name
}

output "topic_id" {
  description = "The topic that carries the jobs."
  value       = google_pubsub_topic.jobs.name
  depends_on  = [google_pubsub_topic_iam_member.api_publishes]
}

output "workers_subscription_id" {
  description = "The subscription that all of the model's workers pull."
  value       = google_pubsub_subscription.workers.name
  depends_on  = [google_pubsub_subscription_iam_member.workers_pull]
}
