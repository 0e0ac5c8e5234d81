"""Objectives, alerts, and dashboards, defined once and rendered for Google and for Prometheus.

`python -m penstock_monitoring` writes the files in `rendered/`, of which Terraform reads two.
`penstock monitoring` writes files for your own Prometheus and Grafana.
"""
