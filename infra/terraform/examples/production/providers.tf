# Budgets are asked for in the name of a project, which the credentials of a
# person do not name by themselves. Its API Cloud Resource Manager must be on.

provider "google" {
  billing_project       = var.project_id
  user_project_override = true
}

provider "google-beta" {
  billing_project       = var.project_id
  user_project_override = true
}
