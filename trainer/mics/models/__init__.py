"""The bundled models."""
