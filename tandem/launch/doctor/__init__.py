"""`tandem doctor`: does this machine have what a run needs, and if not, what mends it."""
