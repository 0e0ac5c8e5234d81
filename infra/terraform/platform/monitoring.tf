# What wakes somebody, what it means and what to do: docs/how-to/troubleshoot.md has a
# part for each alert.

locals {
  # tools/monitoring defines alerts and dashboard, for Prometheus and Grafana
  # too, and writes these templates.
  _monitoring = "${path.module}/../../monitoring/rendered"
  # Terraform's 1 - 0.999 has 500 bits.
  _objectives = {
    availability_budget = tonumber(format("%.9f", 1 - local.options.slos.availability))
    deadlines_budget    = tonumber(format("%.9f", 1 - local.options.slos.deadlines))
    least_bad_events    = local.options.slos.least_bad_events
  }
  # Before there is an API, no metrics arrive from it.
  _alerts = {
    for key, alert in jsondecode(templatefile("${local._monitoring}/alerts.json.tftpl", local._objectives)) :
    key => alert if !contains(["metrics-missing", "outside-down"], key) || local.options.api.image != null
  }
  _prices = yamldecode(file("${path.module}/../prices.yaml")).prices
  # By GPU type: per GPU of a machine with one, and of one with several.
  _gpu_hour_usd = { for type, gpu in local.gpu_types : type => [
    for machine in [gpu.machine_type, try(gpu.larger_priced_as, gpu.machine_type)] :
    try(var.gpu_hour_usd[type], local._prices["machine/${machine}/on-demand"].usd[local.home], 0)
  ] }
  # What a worker costs in an hour, as PromQL: a vector with the label worker.
  _worker_hour_usd = join(" or ", [
    for one in distinct([for model in values(local.models) : { gpu = model.gpu, worker = model.worker }]) :
    "label_replace(vector(${format("%.6f", try(local._gpu_hour_usd[one.gpu.type][one.gpu.count > 1 ? 1 : 0], 0) * one.gpu.count / one.gpu.share)}), 'worker', '${one.worker}', '', '')"
  ])
  alerts = merge(
    local._alerts,
    local.row_archive_alerts,
    { for name, model in local.models : "dead-letters-${model.slug}" => {
      anchor              = "docs/how-to/troubleshoot.md#model-dead-letters"
      duration            = "0s"
      evaluation_interval = "60s"
      query               = "pubsub_googleapis_com:subscription_num_undelivered_messages{monitored_resource=\"pubsub_subscription\",subscription_id=\"${module.model[name].dead_letter_topic_id}.keep\"} > 0"
      severity            = "CRITICAL"
      title               = "${name}: dead letters"
    } },
    { for name, model in local.models : "backlog-${model.slug}" => {
      anchor              = "docs/how-to/troubleshoot.md#model-jobs-wait-too-long"
      duration            = "180s"
      evaluation_interval = "60s"
      query               = "pubsub_googleapis_com:subscription_oldest_unacked_message_age{monitored_resource=\"pubsub_subscription\",subscription_id=\"${module.model[name].workers_subscription_id}\"} > ${local.options.alerts.oldest_job_s}"
      severity            = "CRITICAL"
      title               = "${name}: jobs wait too long"
    } },
  )
  # Everything that fires, and what wakes somebody.
  channels = concat(
    [for channel in google_monitoring_notification_channel.email : channel.id],
    [for channel in google_monitoring_notification_channel.slack : channel.id],
  )
  pagers = [for channel in google_monitoring_notification_channel.pagerduty : channel.id]
  # Where callers come in: the domain, or each region.
  _outside = local.options.api.image == null ? {} : (
    var.domain != null ? { domain = var.domain } : { for name, region in module.region : name => trimprefix(region.api.uri, "https://") }
  )
}

resource "google_monitoring_notification_channel" "email" {
  for_each = toset(local.options.alerts.emails)

  project      = var.project_id
  display_name = each.key
  type         = "email"
  labels       = { email_address = each.key }

  depends_on = [google_project_service.default]
}

resource "google_monitoring_notification_channel" "slack" {
  for_each = toset(local.options.alerts.slack)

  project      = var.project_id
  display_name = each.key
  type         = "slack"
  labels       = { channel_name = each.key }

  sensitive_labels {
    auth_token_wo         = try(var.alert_tokens.slack, null)
    auth_token_wo_version = local.options.alerts.tokens_version
  }

  depends_on = [google_project_service.default]
}

resource "google_monitoring_notification_channel" "pagerduty" {
  for_each = toset(local.options.alerts.pagerduty)

  project      = var.project_id
  display_name = each.key
  type         = "pagerduty"

  sensitive_labels {
    service_key_wo         = try(var.alert_tokens.pagerduty[each.key], null)
    service_key_wo_version = local.options.alerts.tokens_version
  }

  depends_on = [google_project_service.default]
}

# From outside, through DNS, certificate and balancer. Google's front end
# answers /healthz itself, and Cloud Armor keeps /readyz to those who run the API.
resource "google_monitoring_uptime_check_config" "outside" {
  for_each = local._outside

  project      = var.project_id
  display_name = "${var.prefix}-${each.key}"
  period       = "60s"
  timeout      = "10s"

  http_check {
    path         = "/livez"
    port         = 443
    use_ssl      = true
    validate_ssl = true
  }

  monitored_resource {
    type   = "uptime_url"
    labels = { project_id = var.project_id, host = each.value }
  }

  depends_on = [google_project_service.default]
}

resource "google_monitoring_alert_policy" "default" {
  for_each = local.alerts

  project               = var.project_id
  display_name          = "${var.prefix}: ${each.value.title}"
  combiner              = "OR"
  notification_channels = concat(local.channels, each.value.severity == "CRITICAL" ? local.pagers : [])
  severity              = each.value.severity
  user_labels           = merge(var.labels, { alert = each.key })

  conditions {
    display_name = each.value.title

    # Our metrics exist only after the first scrape.
    condition_prometheus_query_language {
      disable_metric_validation = true
      duration                  = each.value.duration
      evaluation_interval       = each.value.evaluation_interval
      query                     = each.value.query
    }
  }

  documentation {
    content = "What it means and what to do: ${each.value.anchor}"
    subject = "${var.prefix}: ${each.value.title}"

    dynamic "links" {
      for_each = local.options.alerts.runbook_url == null ? {} : { runbook = local.options.alerts.runbook_url }

      content {
        display_name = "Runbook"
        url          = "${links.value}#${split("#", each.value.anchor)[1]}"
      }
    }
  }

  depends_on = [google_project_service.default]
}

resource "google_monitoring_dashboard" "default" {
  project = var.project_id

  dashboard_json = jsonencode(merge(
    { displayName = var.prefix },
    jsondecode(templatefile("${local._monitoring}/dashboard.json.tftpl", merge(local._objectives, {
      worker_hour_usd = local._worker_hour_usd
    }))),
  ))

  depends_on = [google_project_service.default]
}

resource "google_billing_budget" "default" {
  for_each = local.options.budget == null ? {} : { monthly = local.options.budget }

  billing_account = each.value.billing_account
  display_name    = "${var.prefix} in ${var.project_id}"

  amount {
    specified_amount {
      currency_code = each.value.currency
      units         = tostring(each.value.units_per_month)
    }
  }

  all_updates_rule {
    monitoring_notification_channels = local.channels
  }

  budget_filter {
    projects        = ["projects/${data.google_project.default.number}"]
    calendar_period = "MONTH"
  }

  dynamic "threshold_rules" {
    for_each = { "0.5" = "CURRENT_SPEND", "0.9" = "CURRENT_SPEND", "1.0" = "FORECASTED_SPEND" }

    content {
      threshold_percent = tonumber(threshold_rules.key)
      spend_basis       = threshold_rules.value
    }
  }

  depends_on = [google_project_service.default]
}
