"""The report of a run: one HTML file that tells what happened and why."""
