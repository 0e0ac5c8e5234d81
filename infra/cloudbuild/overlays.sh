#!/usr/bin/env bash
# Writes the overlay of every region's workers, what the next step's Terraform is told of each region, and the API's
# addresses for the rollout.
set -euo pipefail
mkdir -p var/deploy
.venv/bin/python - <<'PYTHON'
import json, pathlib

release = pathlib.Path("release")
platform = json.loads((release / "platform.json").read_text())
(release / "api_urls.json").write_text(json.dumps(platform["api_urls"]))
(release / "clusters").write_text("".join(f"{region} {name}\n" for region, name in platform["clusters"].items()))
PYTHON
while read -r region _; do
  .venv/bin/python -m infra.kubernetes --out "var/deploy/$region" --deployments release/deployments.json \
    --region "$region" --image "$(cat release/worker.image)"
done < release/clusters
