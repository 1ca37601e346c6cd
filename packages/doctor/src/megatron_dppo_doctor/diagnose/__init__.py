"""The mismatch ledger: where the difference between engine and trainer comes from, cause by cause."""
