"""One tiny step of the quickstart, in a process and a directory of its own: generate, train, sync, save."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

from tandem.launch.doctor.findings import Finding

TIMEOUT_S = 600.0
SETTINGS = (
    *("ppo.max_num_steps=1", "ppo.num_prompts_per_step=2", "ppo.num_generations_per_prompt=2"),
    *("policy.train_global_batch_size=4", "policy.generation.max_new_tokens=8", "data.validation=null"),
    *("logger.console=silent", "logger.tensorboard=false"),
)


def cycle() -> Finding:
    """Whether a step can be trained here, and how long it took, imports included."""
    command = [sys.executable, "-m", "tandem", "train", "quickstart", *SETTINGS]
    with tempfile.TemporaryDirectory(prefix="tandem-doctor-") as folder:
        begin = time.perf_counter()
        try:
            done = subprocess.run([*command, f"run_dir={folder}"], capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Finding("one step", "broken", f"not done after {TIMEOUT_S:.0f} s", again(command))
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line and not line.startswith("(--debug")]
        reason = lines[-1] if lines else "nothing was said"
        return Finding("one step", "broken", f"exit code {done.returncode}: {reason}", again(command))
    seconds = time.perf_counter() - begin
    return Finding("one step", "ok", f"rollouts, critic and actor updates, weight sync, checkpoint in {seconds:.0f} s")


def again(command: list[str]) -> str:
    """How to see all of it."""
    return f"see what is above; all of it: {' '.join(['tandem', *command[3:]])} --debug"
