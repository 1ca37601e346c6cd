"""Commands that look for the cause of a problem: ``doctor``, ``diagnose``, ``replay``."""
