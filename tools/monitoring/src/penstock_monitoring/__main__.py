"""`python -m penstock_monitoring`: writes the repository's rendered alerts and dashboards.

Run this after changing this package. A test checks that the files are up to date.
"""

from penstock_monitoring.files import write_rendered

if __name__ == "__main__":
    write_rendered()
