"""`python -m infra.monitoring`: writes the files that the repository has of alerts and dashboards.

To be run after a change in this package. A test compares them.
"""

from infra.monitoring.files import write_rendered

if __name__ == "__main__":
    write_rendered()
