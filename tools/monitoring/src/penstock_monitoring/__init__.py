"""Objectives, alerts, and dashboards, defined once and rendered for Google and for Prometheus.

`python -m penstock_monitoring` writes the files in `rendered/`, two of which Terraform reads.
`penstock monitoring` writes files for your own Prometheus and Grafana.
"""
