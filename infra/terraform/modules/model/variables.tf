variable "api_member" {
  description = "IAM member that publishes jobs."
  type        = string
  nullable    = false
}

variable "dead_letter_push" {
  description = "Function that dead letters are pushed to: its URL, the account that calls it, and the audience of its tokens. Null: dead letters are only kept."
  type = object({
    audience      = string
    invoker_email = string
    url           = string
  })
  default = null
}

variable "dead_letter_retention_s" {
  description = "How long, in seconds, dead letters are kept."
  type        = number
  default     = 604800
  nullable    = false

  validation {
    condition     = var.dead_letter_retention_s >= 600 && var.dead_letter_retention_s <= 2678400
    error_message = "dead_letter_retention_s: must be from 600 to 2678400 (10 minutes to 31 days), Pub/Sub's limits."
  }
}

variable "draining_members" {
  description = "For a canary: IAM members that pull its jobs after it is taken back, by an arbitrary name."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "forwarding_members" {
  description = "For a model with a canary or in a flow: IAM members that forward jobs to it, by an arbitrary name."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "labels" {
  description = "Labels for every resource."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "name" {
  description = "The model's name in models.yaml."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z][A-Za-z0-9._-]{2,199}$", var.name)) && !endswith(var.name, ".dead")
    error_message = "name: must have 3 to 200 letters, digits, dots, underscores or hyphens, start with a letter and not end in .dead."
  }
}

variable "project_id" {
  description = "Project of every resource."
  type        = string
  nullable    = false
}

variable "pubsub_agent" {
  description = "IAM member of Pub/Sub's service agent."
  type        = string
  nullable    = false
}

variable "storage_regions" {
  description = "Regions in which Pub/Sub may store jobs; empty: anywhere."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "worker_members" {
  description = "IAM members that pull this model's jobs, by an arbitrary name."
  type        = map(string)
  nullable    = false
}

variable "workers" {
  description = "Lease, retention, and redelivery settings of the workers' subscription. Retention must be longer than any deadline in the catalog."
  type = object({
    ack_deadline_s        = optional(number, 10)
    max_delivery_attempts = optional(number, 5)
    retention_s           = optional(number, 3600)
    retry_max_s           = optional(number, 10)
    retry_min_s           = optional(number, 0.1)
  })
  default  = {}
  nullable = false

  validation {
    condition     = var.workers.max_delivery_attempts >= 5 && var.workers.max_delivery_attempts <= 100
    error_message = "workers.max_delivery_attempts: must be from 5 to 100, Pub/Sub's limits."
  }

  validation {
    condition     = var.workers.retry_min_s >= 0 && var.workers.retry_min_s <= var.workers.retry_max_s && var.workers.retry_max_s <= 600
    error_message = "workers.retry_min_s: must be at least 0 and at most workers.retry_max_s, which must be at most 600."
  }
}
