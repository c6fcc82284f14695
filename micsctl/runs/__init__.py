"""The life of a run: launch, follow, stop. The run's folder on the nodes is the truth."""
