"""Folders of Hugging Face from and for a policy: export, adapters, conversion, quantization, upcycling."""
