"""A run in many processes, placed by Ray. The driver holds the loop; engines and ranks of trainers are Ray actors."""
