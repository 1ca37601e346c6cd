"""Measurements and reports of benchmarks/head.py, independent of any single method."""
