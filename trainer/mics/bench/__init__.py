"""Ways to train the same model on the same machines, against each other: `python -m mics.bench --config run.json`."""
