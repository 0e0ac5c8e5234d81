variable "api_image" {
  description = "API image, by digest; null for the first apply, which creates the registry."
  type        = string
  default     = null
}

variable "domain" {
  description = "Domain of the API."
  type        = string
  nullable    = false
}

variable "project_id" {
  description = "Project in which everything is created."
  type        = string
  nullable    = false
}

variable "registry_location" {
  description = "Location of the registry: asia, europe, us, or a region."
  type        = string
  default     = null
}
