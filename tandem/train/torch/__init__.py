"""The torch backend: transformers models, packed sequences, one process."""
