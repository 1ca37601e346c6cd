"""What benchmarks/head.py measures and how it reports; knows nothing about any single method."""
