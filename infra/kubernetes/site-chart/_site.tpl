{{/*
What the templates that site_chart.py writes have in common. Values are those of a site file (site.py).
Each definition returns JSON, or the lines that it adds.
*/}}

{{/* The values, with the defaults of the kinds that were chosen. Helm can't have those in values.yaml: it would mix two kinds. */}}
{{- define "penstock.site" -}}
{{- $site := deepCopy .Values -}}
{{- $kinds := .Files.Get "files/defaults.json" | fromJson -}}
{{- range $part := list "broker" "rows" "redis" "objects" -}}
{{- $chosen := index $.Values $part -}}
{{- $defaults := index $kinds $part $chosen.kind -}}
{{- $_ := set $site $part (mergeOverwrite (deepCopy $defaults) $chosen) -}}
{{- end -}}
{{- $site | toJson -}}
{{- end -}}

{{/* The settings that every process has, which have to agree. */}}
{{- define "penstock.settings" -}}
{{- $site := include "penstock.site" . | fromJson -}}
{{- $objects := $site.objects.kind | eq "bucket" | ternary $site.objects.url "file:///var/lib/penstock/objects" -}}
{{- $redis := $site.redis.kind | eq "given" | ternary $site.redis.url "redis://redis:6379/0" -}}
{{- $settings := dict
  "PENSTOCK_DATASET" $site.dataset
  "PENSTOCK_OBJECTS_URL" $objects
  "PENSTOCK_PROJECT" "penstock"
  "PENSTOCK_RECORDS_URL" $redis
  "PENSTOCK_REDIS_URL" $redis
  "PENSTOCK_REGION" $site.region -}}
{{- if eq $site.broker.kind "embedded" }}{{ $_ := set $settings "PENSTOCK_PUBSUB_ENDPOINT" "pubsub:8085" }}{{ end -}}
{{- if eq $site.rows.kind "embedded" }}{{ $_ := set $settings "PENSTOCK_BIGQUERY_ENDPOINT" "http://bigquery:9050" }}{{ end -}}
{{- if $site.rows.archive }}{{ $_ := set $settings "PENSTOCK_ROWS_URL" (printf "%s/usage" $objects) }}{{ end -}}
{{- with $site.google -}}
{{- $_ := set $settings "PENSTOCK_PROJECT" .project -}}
{{- $_ := set $settings "GOOGLE_CLOUD_PROJECT" .project -}}
{{- $_ := set $settings "GOOGLE_APPLICATION_CREDENTIALS" "/etc/penstock-google/credentials.json" -}}
{{- end -}}
{{- $settings | toJson -}}
{{- end -}}

{{/* Those of the API, the runner of batches, the functions and the row archive. */}}
{{- define "penstock.clients" -}}
{{- $site := include "penstock.site" . | fromJson -}}
{{- $settings := merge (include "penstock.settings" . | fromJson) (.Files.Get "files/clients.json" | fromJson) -}}
{{- $_ := set $settings "PENSTOCK_INVOICE_SELLER" $site.invoices.seller -}}
{{- $_ := set $settings "PENSTOCK_INVOICE_TAX_NAME" $site.invoices.tax_name -}}
{{- $_ := set $settings "PENSTOCK_INVOICE_TAX_PERCENT" ($site.invoices.tax_percent | toString) -}}
{{- if and (eq $site.broker.kind "google") $site.broker.inbox_pool -}}
{{- $_ := set $settings "PENSTOCK_INBOX_POOL" ($site.broker.inbox_pool | int64 | toString) -}}
{{- $_ := set $settings "PENSTOCK_INBOX_FIRST" ($site.broker.inbox_first | int64 | toString) -}}
{{- $_ := set $settings "PENSTOCK_REPLY_SLOTS" ($site.broker.inbox_slots | int64 | toString) -}}
{{- end -}}
{{- with $site.ingress -}}
{{- $_ := set $settings "PENSTOCK_PUBLIC_URL" (printf "https://%s" .host) -}}
{{- $_ := set $settings "PENSTOCK_TRUSTED_PROXIES" (join "," .networks) -}}
{{- end -}}
{{- $settings | toJson -}}
{{- end -}}

{{/* Those of the worker of one model: of (list $ slug). */}}
{{- define "penstock.worker" -}}
{{- $own := (index . 0).Files.Get (printf "files/%s/settings.json" (index . 1)) | fromJson -}}
{{- merge (include "penstock.settings" (index . 0) | fromJson) $own | toJson -}}
{{- end -}}

{{/* The name of a ConfigMap with these data, as Kustomize makes it: of (list name JSON). Changed data replace the pods. */}}
{{- define "penstock.hashed" -}}
{{- $content := dict "data" (index . 1 | fromJson) "kind" "ConfigMap" "name" "" | toJson -}}
{{- $hash := $content | sha256sum | trunc 10 | replace "0" "g" | replace "1" "h" | replace "3" "k" | replace "a" "m" | replace "e" "t" -}}
{{- printf "%s-%s" (index . 0) $hash -}}
{{- end -}}

{{/* Further variables of every Deployment: the broker's and the object store's Secrets. */}}
{{- define "penstock.envFrom" -}}
{{- if eq .Values.broker.kind "rabbitmq" }}
- secretRef:
    name: {{ .Values.broker.secret | quote }}
{{- end }}
{{- if and (eq .Values.objects.kind "bucket") .Values.objects.secret }}
- secretRef:
    name: {{ .Values.objects.secret | quote }}
{{- end }}
{{- end -}}

{{- define "penstock.volumeMounts" -}}
{{- if eq .Values.objects.kind "volume" }}
- name: objects
  mountPath: /var/lib/penstock/objects
{{- end }}
{{- if .Values.google }}
- name: google
  mountPath: /etc/penstock-google
  readOnly: true
{{- end }}
{{- end -}}

{{- define "penstock.volumes" -}}
{{- if eq .Values.objects.kind "volume" }}
- name: objects
  persistentVolumeClaim:
    claimName: objects
{{- end }}
{{- with .Values.google }}
- name: google
  secret:
    secretName: {{ .credentials_secret | quote }}
{{- end }}
{{- end -}}

{{/* Network rules of private addresses. */}}
{{- define "penstock.egress" -}}
{{- $site := include "penstock.site" . | fromJson -}}
{{- if eq $site.broker.kind "rabbitmq" }}
{{- include "penstock.rule" (list $site.broker.networks $site.broker.port) }}
{{- end }}
{{- if eq $site.redis.kind "given" }}
{{- $port := regexFind ":[0-9]+$" (urlParse $site.redis.url).host | trimPrefix ":" | default "6379" }}
{{- include "penstock.rule" (list $site.redis.networks $port) }}
{{- end }}
{{- if and (eq $site.objects.kind "bucket") $site.objects.networks }}
{{- include "penstock.rule" (list $site.objects.networks $site.objects.port) }}
{{- end }}
{{- end -}}

{{- define "penstock.rule" }}
- to:
  {{- range index . 0 }}
  - ipBlock:
      cidr: {{ . | quote }}
  {{- end }}
  ports:
  - port: {{ index . 1 | int64 }}
    protocol: TCP
{{- end -}}

{{/* Labels that select the site's series in its Prometheus, after other ones. */}}
{{- define "penstock.matchers" -}}
{{- $labels := .Values.autoscaling.labels -}}
{{- if kindIs "invalid" $labels }}{{ $labels = dict "namespace" .Values.namespace }}{{ end -}}
{{- range $name, $value := $labels }},{{ $name }}="{{ $value }}"{{ end -}}
{{- end -}}

{{/* Redis' own bound in MB: 60 % of the pod's memory. */}}
{{- define "penstock.maxmemory" -}}
{{- $units := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
{{- $unit := regexFind "[MGT]i$" . -}}
{{- div (mul (trimSuffix $unit . | int64) (index $units $unit) @PERCENT@) 100 }}mb
{{- end -}}
