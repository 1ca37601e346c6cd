"""Reports of a run: metrics, console lines, curves, the HTML report, and the closing summary."""
