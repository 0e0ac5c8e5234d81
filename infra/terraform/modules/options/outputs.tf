output "alerts" {
  description = "The stage's `alerts`, checked."
  value       = var.alerts

  precondition {
    condition     = length(local.unknown.alerts) == 0
    error_message = "There is no option ${join(", ", local.unknown.alerts)}. There are ${join(", ", local.options.alerts)}."
  }
}

output "analysts" {
  description = "The stage's `analysts`, checked."
  value       = var.analysts

  precondition {
    condition     = length(local.unknown.analysts) == 0
    error_message = "There is no option ${join(", ", local.unknown.analysts)}. There are ${join(", ", local.options.analysts)}."
  }
}

output "api" {
  description = "The stage's `api`, checked."
  value       = var.api

  precondition {
    condition     = length(local.unknown.api) == 0
    error_message = "There is no option ${join(", ", local.unknown.api)}. There are ${join(", ", local.options.api)}."
  }
}

output "armor" {
  description = "The stage's `armor`, checked."
  value       = var.armor

  precondition {
    condition     = length(local.unknown.armor) == 0
    error_message = "There is no option ${join(", ", local.unknown.armor)}. There are ${join(", ", local.options.armor)}."
  }
}

output "batches" {
  description = "The stage's `batches`, checked."
  value       = var.batches

  precondition {
    condition     = length(local.unknown.batches) == 0
    error_message = "There is no option ${join(", ", local.unknown.batches)}. There are ${join(", ", local.options.batches)}."
  }
}

output "budget" {
  description = "The stage's `budget`, checked."
  value       = var.budget

  precondition {
    condition     = length(local.unknown.budget) == 0
    error_message = "There is no option ${join(", ", local.unknown.budget)}. There are ${join(", ", local.options.budget)}."
  }
}

output "cache" {
  description = "The stage's `cache`, checked."
  value       = var.cache

  precondition {
    condition     = length(local.unknown.cache) == 0
    error_message = "There is no option ${join(", ", local.unknown.cache)}. There are ${join(", ", local.options.cache)}."
  }
}

output "delivery" {
  description = "The stage's `delivery`, checked."
  value       = var.delivery

  precondition {
    condition     = length(local.unknown.delivery) == 0
    error_message = "There is no option ${join(", ", local.unknown.delivery)}. There are ${join(", ", local.options.delivery)}."
  }
}

output "functions" {
  description = "The stage's `functions`, checked."
  value       = var.functions

  precondition {
    condition     = length(local.unknown.functions) == 0
    error_message = "There is no option ${join(", ", local.unknown.functions)}. There are ${join(", ", local.options.functions)}."
  }
}

output "inboxes" {
  description = "The stage's `inboxes`, checked."
  value       = var.inboxes

  precondition {
    condition     = length(local.unknown.inboxes) == 0
    error_message = "There is no option ${join(", ", local.unknown.inboxes)}. There are ${join(", ", local.options.inboxes)}."
  }
}

output "nodes" {
  description = "The stage's `nodes`, checked."
  value       = var.nodes

  precondition {
    condition     = length(local.unknown.nodes) == 0
    error_message = "There is no option ${join(", ", local.unknown.nodes)}. There are ${join(", ", local.options.nodes)}."
  }
}

output "objects_days" {
  description = "The stage's `objects_days`, checked."
  value       = var.objects_days

  precondition {
    condition     = length(local.unknown.objects_days) == 0
    error_message = "There is no option ${join(", ", local.unknown.objects_days)}. There are ${join(", ", local.options.objects_days)}."
  }
}

output "outside" {
  description = "The stage's `outside`, checked."
  value       = var.outside

  precondition {
    condition     = length(local.unknown.outside) == 0
    error_message = "There is no option ${join(", ", local.unknown.outside)}. There are ${join(", ", local.options.outside)}."
  }
}

output "records" {
  description = "The stage's `records`, checked."
  value       = var.records

  precondition {
    condition     = length(local.unknown.records) == 0
    error_message = "There is no option ${join(", ", local.unknown.records)}. There are ${join(", ", local.options.records)}."
  }
}

output "regions" {
  description = "The stage's `regions`, checked."
  value       = var.regions

  precondition {
    condition     = length(local.unknown.regions) == 0
    error_message = "There is no option ${join(", ", local.unknown.regions)}. There are ${join(", ", local.options.regions)}."
  }
}

output "rows" {
  description = "The stage's `rows`, checked."
  value       = var.rows

  precondition {
    condition     = length(local.unknown.rows) == 0
    error_message = "There is no option ${join(", ", local.unknown.rows)}. There are ${join(", ", local.options.rows)}."
  }
}

output "slos" {
  description = "The stage's `slos`, checked."
  value       = var.slos

  precondition {
    condition     = length(local.unknown.slos) == 0
    error_message = "There is no option ${join(", ", local.unknown.slos)}. There are ${join(", ", local.options.slos)}."
  }
}

output "traces" {
  description = "The stage's `traces`, checked."
  value       = var.traces

  precondition {
    condition     = length(local.unknown.traces) == 0
    error_message = "There is no option ${join(", ", local.unknown.traces)}. There are ${join(", ", local.options.traces)}."
  }
}

output "weights" {
  description = "The stage's `weights`, checked."
  value       = var.weights

  precondition {
    condition     = length(local.unknown.weights) == 0
    error_message = "There is no option ${join(", ", local.unknown.weights)}. There are ${join(", ", local.options.weights)}."
  }
}
