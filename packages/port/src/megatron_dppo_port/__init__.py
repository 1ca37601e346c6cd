"""Launch scripts and configurations of verl, slime and prime-rl as configurations of this package."""
