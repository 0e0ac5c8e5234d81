# models.yaml is the only place that names a model: here its entries become
# topics, subscriptions and the identity of its workers.

locals {
  models = {
    for entry in local._deployed : entry.name => {
      # As infra/kubernetes/overlay.py says it.
      compiles = try(entry.task, "") == "image" && try(entry.gpu.type, "none") != "none" && try(entry.image.compile, "auto") != "never"
      gpu = {
        count        = try(entry.gpu.count, 1)
        provisioning = try(entry.gpu.provisioning, "standard")
        share        = try(entry.gpu.share, 1)
        sharing      = try(entry.gpu.sharing, "time-sharing")
        type         = try(entry.gpu.type, "none")
      }
      deadline_s = try(entry.deadline.longest_s, 300)
      # What its class gets of Secret Manager: project and name of each secret.
      secrets = distinct([
        for place in values(try(entry.secrets, {})) : join("/", slice(split("/", place), 1, 4)) if startswith(place, "google:")
      ])
      slug   = local._slugs[entry.name]
      source = entry.source
      ttl_s  = try(entry.cache.ttl_s, 86400)
      # Whose pods serve it: its own, or those that it shares with other models.
      worker = local._slugs[lookup(local._workers_of, entry.name, entry.name)]
    }
  }
  # A canary is a model of its own here, with the topics and the identity of its
  # workers.
  _entries = yamldecode(file(local.models_file)).models
  _deployed = concat(local._entries, [
    for entry in local._entries : merge(entry, {
      name   = "${entry.name}.canary"
      source = coalesce(try(entry.canary.source, null), entry.source)
    }) if try(entry.canary, null) != null
  ])
  _workers     = try(yamldecode(file(local.models_file)).workers, [])
  _workers_of  = merge([for entry in local._workers : { for name in entry.models : name => entry.name }]...)
  _with_canary = [for entry in local._entries : entry.name if try(entry.canary, null) != null]
  _worker_members = {
    for name, model in local.models : name => merge(
      { gke = "${local.workload_identity}/subject/ns/${var.namespace}/sa/worker-${model.worker}" },
      {
        for place, cluster in local.options.outside :
        place => "principal://${local.outside_pools[place]}/subject/system:serviceaccount:${cluster.namespace}:worker-${model.worker}"
        if cluster.models == null ? true : contains(cluster.models, trimsuffix(name, ".canary"))
      },
    )
  }
  # What a canary does not do goes to the other revision: its workers send it,
  # or those of the other revision once it is taken back, or the function that
  # gets what its workers died of.
  _forwarding_members = {
    for name in local._with_canary : name => merge(
      { for place, member in local._worker_members["${name}.canary"] : "canary-${place}" => member },
      { for place, member in local._worker_members[name] : "stable-${place}" => member },
      { for function, account in google_service_account.functions : function => account.member if function == "dead-letters" },
    )
  }
  # Whoever ends a step of a flow sends the jobs of the next one, and its own
  # once more: the workers of all its models, and the function that gets what
  # these died of.
  _flows = try(yamldecode(file(local.models_file)).flows, [])
  _names = merge([
    for entry in local._entries : {
      for name in concat([entry.name], try(entry.aliases, [])) : name => entry.name
    }
  ]...)
  _flow_models = [for flow in local._flows : distinct([for step in flow.steps : local._names[step.model]])]
  _flow_senders = {
    for name in keys(local.models) :
    name => distinct(flatten([for models in local._flow_models : models if contains(models, name)]))
  }
  _flow_members = {
    for name, senders in local._flow_senders : name => merge(concat(
      [
        for sender in senders : {
          for place, member in local._worker_members[sender] : "flow-${local.models[sender].worker}-${place}" => member
        }
      ],
      [
        {
          for function, account in google_service_account.functions :
          "flow-${function}" => account.member if function == "dead-letters" && length(senders) > 0
        }
      ],
    )...)
  }
  longest_deadline_s      = max(values(local.models)[*].deadline_s...)
  longest_ttl_s           = max(values(local.models)[*].ttl_s...)
  dead_letter_retention_s = 604800

  models_file = var.models_file == null ? "${path.module}/../../../models.yaml" : var.models_file

  # A name that Kubernetes takes; shared/models/kubernetes_names.py makes the same.
  _plain = {
    for name in concat(local._deployed[*].name, local._workers[*].name) :
    name => trim(replace(lower(name), "/[^a-z0-9]+/", "-"), "-")
  }
  _slugs = {
    for name, slug in local._plain :
    name => length(slug) <= 40 ? slug : "${trim(substr(slug, 0, 31), "-")}-${substr(sha256(name), 0, 8)}"
  }
}

# A class gets its secrets from its worker, which alone may read them.
resource "google_secret_manager_secret_iam_member" "classes" {
  for_each = merge([
    for name, model in local.models : {
      for pair in setproduct(model.secrets, keys(local._worker_members[name])) :
      "${model.worker}/${pair[1]}/${pair[0]}" => { secret = split("/", pair[0]), member = local._worker_members[name][pair[1]] }
    }
  ]...)

  project   = each.value.secret[0]
  secret_id = each.value.secret[2]
  role      = "roles/secretmanager.secretAccessor"
  member    = each.value.member

  depends_on = [google_project_service.default]
}

module "model" {
  source   = "../modules/model"
  for_each = local.models

  project_id      = var.project_id
  name            = each.key
  labels          = merge(var.labels, { model = each.value.slug })
  storage_regions = local.storage_regions
  workers         = local.options.delivery
  api_member      = google_service_account.api.member
  pubsub_agent    = local.pubsub_agent

  dead_letter_retention_s = local.dead_letter_retention_s

  worker_members     = local._worker_members[each.key]
  forwarding_members = merge(lookup(local._forwarding_members, each.key, {}), local._flow_members[each.key])
  draining_members   = endswith(each.key, ".canary") ? local._worker_members[trimsuffix(each.key, ".canary")] : {}

  dead_letter_push = local.options.functions.dead_letters == null ? null : {
    audience      = module.function["dead-letters"].audience
    invoker_email = module.function["dead-letters"].invoker_email
    url           = module.function["dead-letters"].url
  }

  depends_on = [google_project_service.default, google_project_service_identity.default]
}
