"""The knobs of a run: checkpoints, logs, machine; and the whole config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.config.algorithm import Count, Grpo, PolicyLoss, Positive, Ppo, ValueLoss
from tandem.config.asynchrony import AsyncRl, Failures
from tandem.config.data import Data
from tandem.config.data_plane import DataPlane, MemoryDataPlane, RayActorDataPlane
from tandem.config.env import Env, PythonEnv, SingleTurnEnv, Verifier
from tandem.config.health import Health
from tandem.config.models import Policy, Reference, Value, VllmEngine
from tandem.config.section import Section


class Checkpointing(Section):
    """What is kept on disk."""

    enabled: bool = True
    save_period: Count = 10
    save_at_end: bool = True
    keep_last_n: Count = 2
    keep_top_k: Annotated[int, Field(ge=0)] = 1  # the best by metric_name, besides the newest
    metric_name: Annotated[str, Field(pattern=r"^(val|train):.+$")] = (
        "val:accuracy"  # or train:NAME, as train:rollout/reward
    )
    higher_is_better: bool = True
    async_save: bool = False  # copy, then write beside training
    checkpoint_must_save_by: Annotated[str, Field(pattern=r"^\d+:\d{2}:\d{2}:\d{2}$")] | None = (
        None  # DD:HH:MM:SS of run time
    )
    resume: str = "auto"  # auto | never | the path of a checkpoint

    @property
    def must_save_by_s(self) -> float | None:
        """Seconds after the start at which the run saves and ends."""
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = (int(part) for part in self.checkpoint_must_save_by.split(":"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class Wandb(Section):
    """Weights & Biases; needs the extra `wandb`."""

    project: str
    name: str | None = None


class Mlflow(Section):
    """MLflow; needs the extra `mlflow`."""

    experiment_name: str
    tracking_uri: str | None = None


class FlightRecorder(Section):
    """Keeps what every trained token was computed from, step by step, in RUN/flight; see docs/flight_recorder.md."""

    max_bytes: Count = 1 << 30  # of all steps on disk; the oldest go


class Logger(Section):
    """Where metrics go besides metrics.jsonl and timeline.json in the run directory."""

    console: Literal["live", "lines", "silent"] = "live"  # live falls back to lines when there is no terminal
    tensorboard: bool = True
    timeline: bool = True
    wandb: Wandb | None = None
    mlflow: Mlflow | None = None
    num_val_samples_to_print: Annotated[int, Field(ge=0)] = 2
    health: Health = Health()
    flight_recorder: FlightRecorder | None = None


class RayCluster(Section):
    """The Ray that places the processes of a run."""

    address: str | None = None  # auto or host:port joins one that runs; None starts one here, on loopback
    dashboard: bool = False  # of the one that is started here
    start_timeout_s: Positive = 600.0  # until all processes are there
    deadline_s: Positive = 1800.0  # of one call of a trainer or an engine; past it the run ends
    # How weights reach engines; auto: on GPUs ipc if they are shared, else collective; object_store on a CPU.
    weight_transfer: Literal["auto", "object_store", "collective", "ipc"] = "auto"
    weight_bucket_bytes: Count = 1 << 28  # of weights that are on their way at one time


class Cluster(Section):
    """The machines."""

    launch: Literal["local", "ray"] = "local"  # local: all in one process
    num_nodes: Count = 1
    gpus_per_node: Count = 1  # processes of one trainer a node; on a CPU too
    ray: RayCluster = RayCluster()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: Count | None = None  # torch threads; None: one a process with a GPU, else all of its cores
    # Of each GPU, for the memory plan where the GPUs are not at hand or are larger. None: what the GPU says.
    gpu_memory_gib: Positive | None = None
    memory_plan: Literal["refuse", "warn"] = "refuse"  # a run on GPUs whose plan is over their memory
    deterministic: bool = False  # refuse operations whose bits may vary; costs speed on a GPU, nothing on a CPU


class Config(Section):
    """The whole run. Exactly one of `ppo` and `grpo`."""

    name: str = "run"
    seed: Annotated[int, Field(ge=0)] = 42
    run_dir: str | None = None  # None: a new runs/<name>-<time>
    ppo: Ppo | None = None
    grpo: Grpo | None = None
    policy: Policy
    value: Value | None = None
    reference: Reference | None = None
    loss_fn: PolicyLoss = PolicyLoss()
    value_loss_fn: ValueLoss | None = None
    async_rl: AsyncRl = AsyncRl()
    failures: Failures = Failures()
    data_plane: DataPlane | None = None  # None: memory in one process, ray_actor under Ray
    data: Data
    env: Annotated[Env, Field(discriminator="name")]
    checkpointing: Checkpointing = Checkpointing()
    logger: Logger = Logger()
    cluster: Cluster = Cluster()

    @property
    def algorithm(self) -> Ppo | Grpo:
        """The one of the two sections that is set."""
        chosen = self.ppo or self.grpo
        assert chosen is not None, "checked when loaded"
        return chosen

    @property
    def verifier(self) -> Verifier | None:
        """What scores; None where the environment does that itself."""
        return None if isinstance(self.env, PythonEnv) else self.env.verifier

    @property
    def longest_response(self) -> int:
        """Tokens that the policy may write in one sample: over all turns, where there are several."""
        policy = self.policy
        one_turn = isinstance(self.env, SingleTurnEnv)
        return policy.generation.max_new_tokens if one_turn else policy.max_total_sequence_length

    @property
    def chosen_data_plane(self) -> DataPlane:
        """The one that is set, or the machine's own."""
        own = RayActorDataPlane(name="ray_actor") if self.cluster.launch == "ray" else MemoryDataPlane()
        return self.data_plane or own

    @property
    def generates_while_training(self) -> bool:
        """Whether requests may be in flight while a step trains."""
        groups = self.algorithm.num_prompts_per_step
        warmup = self.policy_training_start_step
        tickets = max(self.async_rl.sampler.tickets(groups, left) for left in (0, warmup))
        return tickets > groups or self.async_rl.min_groups_for_streaming_train is not None

    @property
    def sleeps_on_gpus(self) -> bool:
        """Whether the engine sleeps while trainers compute, where that is on a GPU."""
        generation = self.policy.generation
        if not isinstance(generation.engine, VllmEngine) or not generation.colocated.enabled:
            return False
        chosen = generation.engine.enable_sleep_mode
        return not self.generates_while_training if chosen is None else chosen

    @property
    def policy_training_start_step(self) -> int:
        return self.ppo.policy_training_start_step if self.ppo else 0

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps of one training step: epochs x mini-batches."""
        mini_batches = -(-self.algorithm.samples_per_step // self.policy.train_global_batch_size)
        return self.algorithm.ppo_epochs * mini_batches
