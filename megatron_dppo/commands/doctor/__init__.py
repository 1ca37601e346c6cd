"""What is installed here, what is known not to work together, and whether the parts compute what they should."""
