"""vLLM as an engine, in this process. The only home of `vllm`.

vLLM reads these when it is imported or started; what the environment says already stays.
"""

import os

# The engine's thread steps the scheduler itself: weights change between two steps, by reference.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# On a CPU: the trainer's threads are in this process too, binding them to cores would slow it.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # where its ranks meet: all are on this machine
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
