"""A run in many processes, placed by Ray. The driver holds the loop; engines and ranks of trainers are Ray actors."""

import tandem.plane.ray_processes  # noqa: F401  before Ray itself: it sets Ray's environment, or says that there is none
