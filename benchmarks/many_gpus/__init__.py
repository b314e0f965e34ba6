"""The parts of benchmarks/many_gpus.sh, and the table of what they left."""
