"""The start of a run: checks before anything is loaded, inputs, engines, the folder and its state."""
