"""`python -m penstock_monitoring`: writes the rendered alerts and dashboards of the repository.

To be run after a change in this package. A test compares them.
"""

from penstock_monitoring.files import write_rendered

if __name__ == "__main__":
    write_rendered()
