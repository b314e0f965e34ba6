"""The only room that names implementations: it builds the roles and runs the loop."""
