#!/usr/bin/env bash
# Schemas and policies of what Kustomize renders and of the Terraform code: kubernetes-validate, KEDA's models, checkov.
# They live in a separate environment below var/ (some 400 MB), made at the first run; nothing goes into .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=var/deploy-check
objects=$work/objects
tools=$work/venv/bin

if [ ! -f "$work/installed" ]; then
  echo "Installing the checkers into $work/venv, once"
  "${PYTHON:-python3}" -m venv "$work/venv"
  "$tools/pip" install --quiet --disable-pip-version-check \
    kubernetes-validate==1.37.0 cloudcoil.models.keda==2.16.1.0 checkov==3.3.30
  touch "$work/installed"
fi

cat > "$work/deployments.json" <<'JSON'
{"europe-west4": {"compute_classes": false, "dataset": "penstock",
  "namespace": "penstock", "objects_url": "gs://example-project-penstock-objects", "rows_url": "gs://example-project-penstock-rows",
  "overflow": "a100",
  "project": "example-project", "records_url": "redis://10.64.32.2:6379/0", "redis_cidrs": ["10.64.32.0/20"],
  "redis_url": "redis://10.64.32.2:6379/0", "region": "europe-west4", "spot": true}}
JSON
reserved='"reservations": {"l4": {"name": "serving", "zone": "europe-west4-a"}}'
sed "s/\"compute_classes\": false/\"compute_classes\": true, $reserved/" "$work/deployments.json" > "$work/classes.json"
# Models of the hub, on all ways to get nodes: with prefetched weights, and with a token.
sed 's/"spot": true/"spot": true, "weights_bucket": "example-project-penstock-weights"/' "$work/deployments.json" > "$work/weights.json"
sed 's/"spot": true/"spot": true, "hub_token": "penstock-hub-token"/' "$work/deployments.json" > "$work/token.json"
cat > "$work/hub.models.yaml" <<'YAML'
models:
  - {name: gated, task: embedding, source: "hf:org/gated", dimensions: 4, batch: {max_tokens: 8}, gpu: {type: l4, share: 4}}
  - {name: waiting, task: embedding, source: "hf:org/large", dimensions: 4, batch: {max_tokens: 8},
     gpu: {type: h100, provisioning: flex-start}}
YAML
pool=//iam.googleapis.com/projects/123456789012/locations/global/workloadIdentityPools/penstock-elsewhere
sed "s|\"spot\": true|\"spot\": false, \"audience\": \"$pool/providers/cluster\"|" "$work/deployments.json" > "$work/outside.json"

render() { # NAME DEPLOYMENTS [OPTION...]
  local name=$1 deployments=$2
  shift 2
  .venv/bin/python -m infra.kubernetes --out "$work/$name" --deployments "$deployments" --region europe-west4 \
    --image "europe-west4-docker.pkg.dev/example-project/penstock/worker@sha256:$(printf '0%.0s' {1..64})" "$@"
  kubectl kustomize "$work/$name" > "$objects/$name.yaml"
}
mkdir -p "$objects"
render pools "$work/deployments.json"
render classes "$work/classes.json"
render outside "$work/outside.json"
render weights "$work/weights.json" --models-file "$work/hub.models.yaml"
render token "$work/token.json" --models-file "$work/hub.models.yaml"

# A whole deployment off Google.
sed -E "s|^(  [a-z]+: \S+):[^ :]+$|\1@sha256:$(printf '0%.0s' {1..64})|" infra/kubernetes/site.example.yaml > "$work/site.yaml"
.venv/bin/python -m infra.kubernetes.self_hosted --site "$work/site.yaml" --out "$work/site"
kubectl kustomize "$work/site" > "$objects/site.yaml"
# The same, scaled by KEDA.
echo 'autoscaling: {prometheus: http://prometheus.monitoring:9090}' | cat "$work/site.yaml" - > "$work/scaled.yaml"
.venv/bin/python -m infra.kubernetes.self_hosted --site "$work/scaled.yaml" --out "$work/scaled"
kubectl kustomize "$work/scaled" > "$objects/scaled.yaml"

for file in "$objects"/*.yaml; do
  # What it warns of are kinds without a schema: KEDA's are checked next, GKE's own by tests/infra/deploy.
  "$tools/kubernetes-validate" --strict --quiet -k 1.35 "$file" 2>&1 | { grep -v "Couldn't find schema" || true; }
done
for name in pools scaled; do
  "$tools/python" infra/kubernetes/check_keda.py "$objects/$name.yaml"
done
nice "$tools/checkov" -d infra/terraform --framework terraform --quiet --compact --skip-download
nice "$tools/checkov" -d "$objects" --framework kubernetes --quiet --compact --skip-download
echo "manifests and Terraform code: no finding that has no reason beside it"
