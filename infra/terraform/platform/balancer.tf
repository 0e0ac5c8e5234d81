# One address for all regions: HTTPS in front of the APIs, with Cloud Armor.
# Without a domain each API answers on its own run.app address instead.

locals {
  _balanced = var.domain == null ? {} : { api = var.domain }
  _in_turn  = [for name, region in local.options.regions : name if !region.drained]
  # The endpoint group's name is fixed, so a region is in as soon as its API is.
  _serving = local.options.api.image == null ? {} : { for name in local._in_turn : name => module.region[name].api.endpoint_group }
}

resource "google_compute_global_address" "api" {
  for_each = local._balanced

  project = var.project_id
  name    = "${var.prefix}-api"

  depends_on = [google_project_service.default]
}

resource "google_compute_managed_ssl_certificate" "api" {
  for_each = local._balanced

  project = var.project_id
  name    = "${var.prefix}-${substr(sha256(each.value), 0, 8)}"

  managed {
    domains = [each.value]
  }

  lifecycle {
    create_before_destroy = true
  }

  depends_on = [google_project_service.default]
}

resource "google_compute_ssl_policy" "api" {
  for_each = local._balanced

  project         = var.project_id
  name            = "${var.prefix}-api"
  profile         = "MODERN"
  min_tls_version = "TLS_1_2"

  depends_on = [google_project_service.default]
}

resource "google_compute_backend_service" "api" {
  for_each = local._balanced

  project               = var.project_id
  name                  = "${var.prefix}-api"
  load_balancing_scheme = "EXTERNAL_MANAGED"
  protocol              = "HTTPS"
  security_policy       = google_compute_security_policy.api[each.key].id

  dynamic "backend" {
    for_each = local._serving

    content {
      group = backend.value
    }
  }

  log_config {
    enable      = true
    sample_rate = 0.1
  }

  # A region that fails whole is left for a while. The API sends 503 and 504
  # by design (docs/decisions/0012), so only an unbroken run counts, and the
  # same for both kinds: 5xx includes 502 to 504. With one region there is
  # nowhere to go.
  dynamic "outlier_detection" {
    for_each = length(local._in_turn) > 1 ? [100] : []

    content {
      consecutive_errors                    = outlier_detection.value
      consecutive_gateway_failure           = outlier_detection.value
      enforcing_consecutive_errors          = 100
      enforcing_consecutive_gateway_failure = 100
      max_ejection_percent                  = 50

      base_ejection_time {
        seconds = 30
      }

      interval {
        seconds = 5
      }
    }
  }
}

resource "google_compute_url_map" "api" {
  for_each = local._balanced

  project         = var.project_id
  name            = "${var.prefix}-api"
  default_service = google_compute_backend_service.api[each.key].id
}

resource "google_compute_target_https_proxy" "api" {
  for_each = local._balanced

  project          = var.project_id
  name             = "${var.prefix}-api"
  url_map          = google_compute_url_map.api[each.key].id
  ssl_certificates = [google_compute_managed_ssl_certificate.api[each.key].id]
  ssl_policy       = google_compute_ssl_policy.api[each.key].id
}

resource "google_compute_global_forwarding_rule" "api" {
  for_each = local._balanced

  project               = var.project_id
  name                  = "${var.prefix}-api"
  labels                = var.labels
  ip_address            = google_compute_global_address.api[each.key].id
  load_balancing_scheme = "EXTERNAL_MANAGED"
  port_range            = "443"
  target                = google_compute_target_https_proxy.api[each.key].id
}

resource "google_compute_security_policy" "api" {
  for_each = local._balanced

  # checkov:skip=CKV_GCP_73: the rule is there, in the newer words that this check does not know

  project = var.project_id
  name    = "${var.prefix}-api"
  type    = "CLOUD_ARMOR"

  adaptive_protection_config {
    layer_7_ddos_defense_config {
      enable = true
    }
  }

  # Probes are for those who run the API.
  rule {
    action      = "deny(404)"
    priority    = 900
    description = "Readiness"

    match {
      expr {
        expression = "request.path.urlDecode().matches('^/readyz$')"
      }
    }
  }

  rule {
    action      = "deny(403)"
    priority    = 1000
    description = "Log4j, as one rule set that no prompt looks like"

    match {
      expr {
        expression = "evaluatePreconfiguredWaf('cve-canary', {'sensitivity': 1})"
      }
    }
  }

  rule {
    action      = "rate_based_ban"
    priority    = 2000
    description = "Callers that ask too often"

    match {
      versioned_expr = "SRC_IPS_V1"

      config {
        src_ip_ranges = ["*"]
      }
    }

    rate_limit_options {
      conform_action   = "allow"
      exceed_action    = "deny(429)"
      enforce_on_key   = "IP"
      ban_duration_sec = 60

      ban_threshold {
        count        = local.options.armor.ban_above_per_min
        interval_sec = 60
      }

      rate_limit_threshold {
        count        = local.options.armor.requests_per_min
        interval_sec = 60
      }
    }
  }

  rule {
    action      = "allow"
    priority    = 2147483647
    description = "Everybody else"

    match {
      versioned_expr = "SRC_IPS_V1"

      config {
        src_ip_ranges = ["*"]
      }
    }
  }

  depends_on = [google_project_service.default]
}
