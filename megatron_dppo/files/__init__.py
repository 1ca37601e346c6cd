"""Writing files so that nothing is lost or half there."""
