"""What a run tells: reduced metrics, timing spans, and the places they are written to."""
