# What wakes somebody, what it means and what to do: docs/operations.md has a
# part for each alert.

locals {
  _runbook = "See docs/operations.md, \"What each alert means\"."
  alerts = merge(
    {
      api-errors = {
        duration = "300s"
        query    = "sum(rate(penstock_api_requests_total{status=~\"5..\"}[5m])) / sum(rate(penstock_api_requests_total[5m])) > ${var.alerts.error_ratio}"
        severity = "CRITICAL"
        title    = "API: too many 5xx"
      }
      api-shedding = {
        duration = "300s"
        query    = "sum(rate(penstock_api_items_shed_total[5m])) > 0"
        severity = "WARNING"
        title    = "API: refusing with 429"
      }
      cache-down = {
        duration = "120s"
        query    = "min(penstock_cache_redis_up) < 1"
        severity = "WARNING"
        title    = "Cache: Redis out of reach"
      }
      keys-unread = {
        duration = "120s"
        query    = "min(penstock_keys_up) < 1"
        severity = "CRITICAL"
        title    = "Keys: can't be read"
      }
      model-process-deaths = {
        duration = "0s"
        query    = "sum by (worker) (increase(penstock_worker_model_process_deaths_total[15m])) > 3"
        severity = "CRITICAL"
        title    = "Worker: its model process keeps dying"
      }
      objects-failing = {
        duration = "120s"
        query    = "sum(rate(penstock_objects_errors_total[5m])) > 0"
        severity = "WARNING"
        title    = "Objects: the store fails"
      }
      records-dropped = {
        duration = "0s"
        query    = "sum(increase(penstock_answers_dropped_total[15m])) + sum(increase(penstock_predictions_dropped_total[15m])) > 0"
        severity = "WARNING"
        title    = "Records: dropped before their time"
      }
      records-down = {
        duration = "60s"
        query    = "min(penstock_records_redis_up) < 1"
        severity = "CRITICAL"
        title    = "Records: Redis out of reach"
      }
      rows-late = {
        duration = "300s"
        query    = "max(penstock_rows_oldest_seconds) > 300"
        severity = "WARNING"
        title    = "Rows: BigQuery out of reach"
      }
      rows-lost = {
        duration = "0s"
        query    = "sum(increase(penstock_rows_lost_total[15m])) > 0"
        severity = "CRITICAL"
        title    = "Rows: lost"
      }
      rows-unsafe = {
        duration = "300s"
        query    = "min(penstock_rows_disk_up) < 1"
        severity = "WARNING"
        title    = "Rows: the disk takes none"
      }
      rows-rejected = {
        duration = "0s"
        query    = "sum(increase(penstock_rows_rejected_total[15m])) > 0"
        severity = "CRITICAL"
        title    = "Rows: refused for good"
      }
      undecodable = {
        duration = "0s"
        query    = "sum(increase(penstock_worker_undecodable_messages_total[15m])) > 0"
        severity = "WARNING"
        title    = "Jobs topic: messages that are no jobs"
      }
    },
    { for name, model in local.models : "dead-letters-${model.slug}" => {
      duration = "0s"
      query    = "pubsub_googleapis_com:subscription_num_undelivered_messages{monitored_resource=\"pubsub_subscription\",subscription_id=\"${module.model[name].dead_letter_topic_id}.keep\"} > 0"
      severity = "CRITICAL"
      title    = "${name}: dead letters"
    } },
    { for name, model in local.models : "backlog-${model.slug}" => {
      duration = "180s"
      query    = "pubsub_googleapis_com:subscription_oldest_unacked_message_age{monitored_resource=\"pubsub_subscription\",subscription_id=\"${module.model[name].workers_subscription_id}\"} > ${var.alerts.oldest_job_s}"
      severity = "CRITICAL"
      title    = "${name}: jobs wait too long"
    } },
  )
  channels = [for channel in google_monitoring_notification_channel.email : channel.id]
}

resource "google_monitoring_notification_channel" "email" {
  for_each = toset(var.alerts.emails)

  project      = var.project_id
  display_name = each.key
  type         = "email"
  labels       = { email_address = each.key }

  depends_on = [google_project_service.default]
}

resource "google_monitoring_alert_policy" "default" {
  for_each = local.alerts

  project               = var.project_id
  display_name          = "${var.prefix}: ${each.value.title}"
  combiner              = "OR"
  notification_channels = local.channels
  severity              = each.value.severity
  user_labels           = merge(var.labels, { alert = each.key })

  conditions {
    display_name = each.value.title

    # Our metrics exist only after the first scrape.
    condition_prometheus_query_language {
      disable_metric_validation = true
      duration                  = each.value.duration
      evaluation_interval       = "60s"
      query                     = each.value.query
    }
  }

  documentation {
    content = local._runbook
    subject = "${var.prefix}: ${each.value.title}"
  }

  depends_on = [google_project_service.default]
}

resource "google_monitoring_dashboard" "default" {
  project = var.project_id

  dashboard_json = jsonencode({
    displayName = var.prefix
    mosaicLayout = {
      columns = 48
      tiles = [for place, chart in [
        { title = "Requests per second, by status", query = "sum by (status) (rate(penstock_api_requests_total[1m]))" },
        { title = "p99 of requests by route, s", query = "histogram_quantile(0.99, sum by (le, route) (rate(penstock_api_request_seconds_bucket[5m])))" },
        { title = "Items in flight, by model", query = "sum by (model) (penstock_api_items_in_flight)" },
        { title = "Items by cache level", query = "sum by (cache) (rate(penstock_api_items_total[1m]))" },
        { title = "Items per batch", query = "sum by (worker) (rate(penstock_worker_batch_items_sum[5m])) / sum by (worker) (rate(penstock_worker_batch_items_count[5m]))" },
        { title = "Seconds in the model per second, by worker", query = "sum by (worker) (rate(penstock_worker_inference_seconds_sum[1m]))" },
        { title = "Oldest job, s", query = "max by (subscription_id) (pubsub_googleapis_com:subscription_oldest_unacked_message_age{monitored_resource=\"pubsub_subscription\",subscription_id=~\"jobs[.].*[.]workers\"})" },
        { title = "Rows written per second", query = "sum(rate(penstock_rows_written_total[1m]))" },
        ] : {
        height = 16
        width  = 24
        xPos   = (place % 2) * 24
        yPos   = floor(place / 2) * 16
        widget = {
          title = chart.title
          xyChart = {
            dataSets = [{ plotType = "LINE", timeSeriesQuery = { prometheusQuery = chart.query } }]
          }
        }
      }]
    }
  })

  depends_on = [google_project_service.default]
}

resource "google_billing_budget" "default" {
  for_each = var.budget == null ? {} : { monthly = var.budget }

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
