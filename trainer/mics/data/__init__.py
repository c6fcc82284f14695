"""The corpus, which sample goes where, and the tensors that a model trains on.

Nothing is imported here, so that `python -m mics.data prepare` needs no torch.
"""
