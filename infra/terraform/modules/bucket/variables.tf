variable "aborts_uploads" {
  description = "Whether what an upload left that broke off is deleted after a day."
  type        = bool
  default     = false
  nullable    = false
}

variable "deleted" {
  description = "What is deleted: objects of some folders, or of all, after so many days, or versions so many days after newer ones came."
  type = list(object({
    days            = optional(number)
    folders         = optional(list(string), [])
    noncurrent_days = optional(number)
  }))
  default  = []
  nullable = false
}

variable "deletion_protection" {
  description = "Whether the bucket refuses to be deleted while it has objects."
  type        = bool
  default     = true
  nullable    = false
}

variable "labels" {
  description = "Labels of the bucket."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "location" {
  description = "A region, EU or US."
  type        = string
  nullable    = false
}

variable "members" {
  description = "Who may do what, by a name of ours. `folder`: only there; `title` of that condition."
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
  description = "Name of the bucket, unique among all of Google's."
  type        = string
  nullable    = false
}

variable "project_id" {
  description = "Project of the bucket."
  type        = string
  nullable    = false
}

variable "soft_delete_days" {
  description = "Days in which what was deleted can be brought back, and is billed. Null: as Google's default."
  type        = number
  default     = null
}

variable "versioning" {
  description = "Whether what is written over is kept."
  type        = bool
  default     = false
  nullable    = false
}
