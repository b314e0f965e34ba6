"""The real controller on a virtual clock: simulated engines, trainers and faults; hours of a run in a second."""
