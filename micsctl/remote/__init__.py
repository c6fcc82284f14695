"""SSH to the nodes. The only place that imports fabric and paramiko."""
