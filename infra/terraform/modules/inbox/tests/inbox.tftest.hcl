# Against a stand-in of the provider: make terraform-check.

variables {
  project_id = "example-project"
  number     = 7
  slots      = 3
  api_member = "serviceAccount:api@example-project.iam.gserviceaccount.com"
  repliers   = { workers = "principalSet://pool/namespace/penstock" }
}

run "slots_and_filters" {
  command = plan

  assert {
    condition = [for slot in google_pubsub_subscription.slots : slot.name] == [
      "inbox.7.slot.0", "inbox.7.slot.1", "inbox.7.slot.2"
    ]
    error_message = "One subscription per slot, named as in shared/broker/pubsub/names.py."
  }

  assert {
    condition = alltrue([
      for slot, subscription in google_pubsub_subscription.slots : subscription.filter == "attributes.slot = \"${slot}\""
    ])
    error_message = "A slot takes the replies that name it."
  }

  assert {
    condition = alltrue([
      for subscription in google_pubsub_subscription.slots :
      subscription.message_retention_duration == "600s" && subscription.expiration_policy[0].ttl == ""
    ])
    error_message = "Replies are kept for as short as Pub/Sub can, the slots for ever."
  }
}

run "direct_replies_are_delivered_once" {
  command = plan

  assert {
    condition = (
      google_pubsub_topic.direct.name == "inbox.7.direct"
      && google_pubsub_subscription.direct.name == "inbox.7.direct"
      && google_pubsub_subscription.direct.filter == null
      && google_pubsub_subscription.direct.message_retention_duration == "600s"
      && google_pubsub_subscription.direct.expiration_policy[0].ttl == ""
    )
    error_message = "One subscription without a filter, named as in shared/broker/pubsub/names.py."
  }
}

run "one_slot_needs_no_filter" {
  command = plan

  variables {
    slots = 1
  }

  assert {
    condition     = google_pubsub_subscription.slots["0"].filter == null
    error_message = "Without others there is nothing to filter out, and filtering is billed."
  }
}

run "least_rights" {
  command = plan

  assert {
    condition = alltrue([
      for member in google_pubsub_subscription_iam_member.api_pulls : member.role == "roles/pubsub.subscriber"
    ]) && length(google_pubsub_subscription_iam_member.api_pulls) == 3
    error_message = "The API pulls from the slots and can't make any."
  }

  assert {
    condition     = google_pubsub_subscription_iam_member.api_pulls_direct.role == "roles/pubsub.subscriber"
    error_message = "The API pulls direct replies."
  }

  assert {
    condition = alltrue([
      for members in [google_pubsub_topic_iam_member.repliers, google_pubsub_topic_iam_member.direct_repliers] :
      [for member in members : member.role] == ["roles/pubsub.publisher"]
    ])
    error_message = "Repliers publish."
  }
}

run "too_many_slots" {
  command = plan

  variables {
    slots = 201
  }

  expect_failures = [var.slots]
}
