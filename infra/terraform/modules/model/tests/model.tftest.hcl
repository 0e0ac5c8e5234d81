# Against a stand-in of the provider: make terraform-check.

variables {
  project_id   = "example-project"
  name         = "all-MiniLM-L6-v2"
  api_member   = "serviceAccount:api@example-project.iam.gserviceaccount.com"
  pubsub_agent = "serviceAccount:service-1@gcp-sa-pubsub.iam.gserviceaccount.com"

  worker_members = {
    gke = "principal://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/example-project.svc.id.goog/subject/ns/penstock/sa/worker-all-minilm-l6-v2"
  }
}

# Its names are known only after an apply, which is made up.
mock_provider "google" {
  alias = "made_up"
}

run "names" {
  command = apply

  providers = {
    google = google.made_up
  }

  assert {
    condition = output.topic_id == "jobs.all-MiniLM-L6-v2" && (
      output.workers_subscription_id == "jobs.all-MiniLM-L6-v2.workers" &&
      output.batch_subscription_id == "jobs.all-MiniLM-L6-v2.batch"
    ) && output.dead_letter_topic_id == "jobs.all-MiniLM-L6-v2.dead"
    error_message = "Topic, subscriptions and dead-letter topic are named as in shared/broker/pubsub/names.py."
  }

  assert {
    condition = alltrue([
      for subscription in [google_pubsub_subscription.workers, google_pubsub_subscription.batch] :
      subscription.dead_letter_policy[0].dead_letter_topic == google_pubsub_topic.dead.id
    ])
    error_message = "What no worker could finish goes to the dead-letter topic."
  }

  assert {
    condition     = google_pubsub_subscription.keep.topic == google_pubsub_topic.dead.id
    error_message = "A topic without a subscription keeps nothing."
  }
}

run "delivery" {
  command = plan

  assert {
    condition = alltrue([
      for subscription in [google_pubsub_subscription.workers, google_pubsub_subscription.batch] :
      subscription.retry_policy[0].minimum_backoff == "0.1s" && subscription.retry_policy[0].maximum_backoff == "10s"
    ])
    error_message = "A job of a dead worker comes again at once, not after the service's own 10 s."
  }

  assert {
    condition = alltrue([
      for subscription in [google_pubsub_subscription.workers, google_pubsub_subscription.batch, google_pubsub_subscription.keep] :
      subscription.expiration_policy[0].ttl == ""
    ])
    error_message = "A model that nobody asks for a month keeps its subscriptions."
  }

  assert {
    condition     = google_pubsub_subscription.workers.filter == "NOT ${google_pubsub_subscription.batch.filter}"
    error_message = "A job has one priority: each goes to one of the two subscriptions."
  }

  assert {
    condition = alltrue([
      for subscription in [google_pubsub_subscription.workers, google_pubsub_subscription.batch] :
      subscription.enable_message_ordering != true
    ])
    error_message = "All workers pull everything of a priority, in order of arrival."
  }

  assert {
    condition     = length(google_pubsub_subscription.push) == 0
    error_message = "Dead letters are pushed to a function only where there is one."
  }
}

run "least_rights" {
  command = plan

  assert {
    condition = google_pubsub_topic_iam_member.api_publishes.role == "roles/pubsub.publisher" && (
      google_pubsub_topic_iam_member.api_publishes.member == var.api_member
    )
    error_message = "The API publishes jobs, and nothing else."
  }

  assert {
    condition = google_pubsub_subscription_iam_member.workers_pull["gke"].role == "roles/pubsub.subscriber" && (
      google_pubsub_subscription_iam_member.workers_pull["gke"].member == var.worker_members["gke"]
    )
    error_message = "This model's workers pull this model's jobs."
  }

  assert {
    condition = google_pubsub_subscription_iam_member.workers_pull_batch["gke"].subscription == "jobs.all-MiniLM-L6-v2.batch" && (
      google_pubsub_subscription_iam_member.workers_pull_batch["gke"].member == var.worker_members["gke"]
    )
    error_message = "This model's workers pull this model's jobs that may wait."
  }

  assert {
    condition = google_pubsub_topic_iam_member.workers_give_up["gke"].topic == "jobs.all-MiniLM-L6-v2.dead" && (
      google_pubsub_topic_iam_member.workers_give_up["gke"].member == var.worker_members["gke"]
    )
    error_message = "A worker that gives a job up puts it with the dead letters itself."
  }

  assert {
    condition = google_pubsub_subscription_iam_member.service_takes_batch.subscription == "jobs.all-MiniLM-L6-v2.batch" && (
      google_pubsub_subscription_iam_member.service_takes_batch.member == var.pubsub_agent
    )
    error_message = "Pub/Sub can take a dead letter off the batch subscription too."
  }
}

run "dead_letters_pushed" {
  command = plan

  variables {
    dead_letter_push = {
      audience      = "dead-letters"
      invoker_email = "push@example-project.iam.gserviceaccount.com"
      url           = "https://dead-letters.example.com"
    }
  }

  assert {
    condition = google_pubsub_subscription.push["push"].push_config[0].oidc_token[0].service_account_email == (
      "push@example-project.iam.gserviceaccount.com"
    )
    error_message = "A push says who it comes from."
  }

  assert {
    condition     = google_pubsub_subscription.push["push"].push_config[0].oidc_token[0].audience == "dead-letters"
    error_message = "A push says who it is for."
  }

  assert {
    condition     = google_pubsub_subscription.keep.name == "jobs.all-MiniLM-L6-v2.dead.keep"
    error_message = "Dead letters are kept as well."
  }
}

run "storage_regions" {
  command = plan

  variables {
    storage_regions = ["europe-west4"]
  }

  assert {
    condition     = google_pubsub_topic.jobs.message_storage_policy[0].allowed_persistence_regions == toset(["europe-west4"])
    error_message = "Jobs stay where they are told to."
  }
}

run "canary" {
  command = plan

  variables {
    name             = "texts.canary"
    draining_members = { gke = "principal://stable" }
  }

  assert {
    condition = google_pubsub_subscription_iam_member.drains["gke"].subscription == "jobs.texts.canary.workers" && (
      google_pubsub_subscription_iam_member.drains_batch["gke"].subscription == "jobs.texts.canary.batch"
    )
    error_message = "Workers of the other revision take what is left in both priorities."
  }
}

run "model_with_a_canary" {
  command = plan

  variables {
    name               = "texts"
    forwarding_members = { canary = "principal://canary" }
  }

  assert {
    condition     = google_pubsub_topic_iam_member.forwards["canary"].topic == "jobs.texts" && length(google_pubsub_subscription_iam_member.drains) == 0
    error_message = "Workers of the canary send jobs to the topic of the other revision."
  }
}

run "reserved_name" {
  command = plan

  variables {
    name = "model.dead"
  }

  expect_failures = [var.name]
}

run "impatient_dead_letters" {
  command = plan

  variables {
    workers = { max_delivery_attempts = 3 }
  }

  expect_failures = [var.workers]
}
