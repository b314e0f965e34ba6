"""The torch backend: transformers models, packed sequences, on one rank or many."""
