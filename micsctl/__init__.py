"""micsctl: train large models with MiCS on AWS GPU machines, from a laptop."""

__version__ = "0.1.0"
