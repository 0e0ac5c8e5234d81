variable "deletion_protection" {
  description = "If true, the instance can't be deleted."
  type        = bool
  default     = true
  nullable    = false
}

variable "labels" {
  description = "Labels for the instance."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "name" {
  description = "ID of the instance."
  type        = string
  nullable    = false
}

variable "network" {
  description = "ID of the network that can connect to it."
  type        = string
  nullable    = false
}

variable "project_id" {
  description = "Project of the instance."
  type        = string
  nullable    = false
}

variable "region" {
  description = "Region of the instance."
  type        = string
  nullable    = false
}

variable "size" {
  description = "Version, node type, and replicas; days to keep daily backups (0: none), maintenance time, and the backup that a new instance starts from."
  type = object({
    backup_days    = optional(number, 7)
    engine_version = optional(string, "VALKEY_8_0")
    from_backup    = optional(string)
    maintenance    = optional(object({ day = optional(string, "SUNDAY"), hour_utc = optional(number, 3) }), {})
    node_type      = optional(string, "STANDARD_SMALL")
    replicas       = optional(number, 1)
  })
  default  = {}
  nullable = false

  validation {
    condition = contains(
      ["SHARED_CORE_NANO", "STANDARD_SMALL", "HIGHMEM_MEDIUM", "HIGHMEM_XLARGE"], var.size.node_type
    )
    error_message = "size.node_type: must be SHARED_CORE_NANO, STANDARD_SMALL, HIGHMEM_MEDIUM or HIGHMEM_XLARGE."
  }

  validation {
    condition     = var.size.replicas >= 0 && var.size.replicas <= 5
    error_message = "size.replicas: must be from 0 to 5."
  }
}
