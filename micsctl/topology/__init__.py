"""What to ask a node, how to read the answer, and in which order nodes get their ranks."""
