variable "aborts_uploads" {
  description = "If true, parts of interrupted uploads are deleted after a day."
  type        = bool
  default     = false
  nullable    = false
}

variable "deleted" {
  description = "Deletion rules: objects in certain folders, or all objects, after a number of days, or old versions a number of days after they were replaced."
  type = list(object({
    days            = optional(number)
    folders         = optional(list(string), [])
    noncurrent_days = optional(number)
  }))
  default  = []
  nullable = false
}

variable "deletion_protection" {
  description = "If true, the bucket can't be deleted while it contains objects."
  type        = bool
  default     = true
  nullable    = false
}

variable "labels" {
  description = "Labels for the bucket."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "location" {
  description = "Location of the bucket: a region, EU, or US."
  type        = string
  nullable    = false
}

variable "members" {
  description = "Grants, by an arbitrary name. `folder` restricts a grant to a folder; `title` is the title of that condition."
  type = map(object({
    folder = optional(string)
    member = string
    role   = string
    title  = optional(string)
  }))
  default  = {}
  nullable = false
}

variable "name" {
  description = "Name of the bucket, unique across Google Cloud."
  type        = string
  nullable    = false
}

variable "project_id" {
  description = "Project of the bucket."
  type        = string
  nullable    = false
}

variable "soft_delete_days" {
  description = "Days during which deleted objects can be restored and are billed. Null: Google's default."
  type        = number
  default     = null
}

variable "versioning" {
  description = "If true, overwritten versions are kept."
  type        = bool
  default     = false
  nullable    = false
}
