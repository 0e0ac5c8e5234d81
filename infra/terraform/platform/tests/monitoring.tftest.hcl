# Objectives, prices and the runbook's URL in alerts and dashboard.

variables {
  project_id        = "example-project"
  registry_location = "europe"
  api               = { image = "europe-west4-docker.pkg.dev/p/penstock/api@sha256:0", max_instances = 1 }
  inboxes           = { per_region = 2, slots = 2 }
}

run "usual_objectives" {
  command = plan

  assert {
    condition     = strcontains(google_monitoring_alert_policy.default["availability-fast"].conditions[0].condition_prometheus_query_language[0].query, "> 14.4 * 0.001 and")
    error_message = "99.9 % of requests."
  }

  assert {
    condition     = strcontains(google_monitoring_alert_policy.default["deadlines-slow"].conditions[0].condition_prometheus_query_language[0].query, "> 1 * 0.01 and")
    error_message = "99 % of items."
  }

  assert {
    condition     = strcontains(google_monitoring_dashboard.default.dashboard_json, "label_replace(vector(0.224300), 'worker', 'all-minilm-l6-v2', '', '')")
    error_message = "A quarter of the list price of an L4's machine in the home region."
  }

  assert {
    condition     = strcontains(google_monitoring_dashboard.default.dashboard_json, "\"$${model}\"")
    error_message = "A legend names a label of its series."
  }
}

run "nobody_is_told_unless_named" {
  command = plan

  assert {
    condition     = length(local.channels) + length(local.pagers) == 0
    error_message = "No channel."
  }

  assert {
    condition     = keys(google_monitoring_uptime_check_config.outside) == ["europe-west4"]
    error_message = "Without a domain each region is asked."
  }
}

run "who_is_told_of_what" {
  command = plan

  variables {
    alert_tokens = { slack = "xoxb-0", pagerduty = { inference = "0" } }
    alerts       = { emails = ["ops@example.com"], pagerduty = ["inference"], slack = ["#inference"] }
    domain       = "api.example.com"
  }

  assert {
    condition = google_monitoring_notification_channel.slack["#inference"].labels.channel_name == "#inference" && (
      google_monitoring_notification_channel.slack["#inference"].type == "slack" &&
      google_monitoring_notification_channel.pagerduty["inference"].type == "pagerduty"
    )
    error_message = "Slack has a channel, PagerDuty a service."
  }

  assert {
    condition     = length(local.channels) == 2 && length(local.pagers) == 1
    error_message = "E-mail and Slack get everything, PagerDuty what is critical."
  }

  assert {
    condition = google_monitoring_uptime_check_config.outside["domain"].monitored_resource[0].labels.host == "api.example.com" && (
      google_monitoring_uptime_check_config.outside["domain"].http_check[0].path == "/livez"
    )
    error_message = "From outside, by the way of callers."
  }
}

run "own_objectives_and_prices" {
  command = plan

  variables {
    alerts       = { runbook_url = "https://example.com/troubleshoot.md" }
    gpu_hour_usd = { l4 = 0.5 }
    slos         = { availability = 0.99, least_bad_events = 3 }
  }

  assert {
    condition     = strcontains(google_monitoring_alert_policy.default["availability-fast"].conditions[0].condition_prometheus_query_language[0].query, "> 14.4 * 0.01 and")
    error_message = "The budget is what the target leaves."
  }

  assert {
    condition     = strcontains(google_monitoring_alert_policy.default["availability-fast"].conditions[0].condition_prometheus_query_language[0].query, "[1h])) >= 3)")
    error_message = "Fewer bad events do not fire."
  }

  assert {
    condition     = google_monitoring_alert_policy.default["cache-down"].documentation[0].links[0].url == "https://example.com/troubleshoot.md#cache-redis-unreachable"
    error_message = "Notifications link to the alert's part."
  }

  assert {
    condition     = strcontains(google_monitoring_dashboard.default.dashboard_json, "label_replace(vector(0.125000), 'worker', 'all-minilm-l6-v2', '', '')")
    error_message = "A price of one's own comes first."
  }
}

run "nothing_is_missing_before_there_is_an_api" {
  command = plan

  variables {
    api = { max_instances = 1 }
  }

  assert {
    condition     = !contains(keys(google_monitoring_alert_policy.default), "metrics-missing")
    error_message = "The first apply must not raise an alarm."
  }
}

run "price_below_nothing" {
  command = plan

  variables {
    gpu_hour_usd = { l4 = -1 }
  }

  expect_failures = [var.gpu_hour_usd]
}
