"""Config -> roles: the run's parts, whatever machinery computes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tandem.algorithms.ppo import PPO
from tandem.config import Config
from tandem.config.asynchrony import WeightFifo, Windowed
from tandem.config.check import to_yaml
from tandem.config.data import MixtureData, Source
from tandem.control.accounts import Accounts
from tandem.control.buffer import Buffer
from tandem.control.checkpoint import Checkpoints, Identity
from tandem.control.controller import Controller
from tandem.control.evaluate import Evaluator
from tandem.control.flight_recorder import FlightRecorder
from tandem.control.health import Facts
from tandem.control.health_watch import HealthWatch
from tandem.control.plan import Plan
from tandem.control.samplers import build_sampler
from tandem.data.chat import Chat
from tandem.data.prompts import Prompts
from tandem.data.sources import rows_of
from tandem.envs.verifiers import check_answers
from tandem.launch.cast import AS_BUILT, Cast
from tandem.launch.environments import build_environment, described_tools
from tandem.launch.machinery import Machinery
from tandem.launch.models import architecture_of, load_tokenizer, shape_of
from tandem.launch.run_dir import FLIGHT, HEALTH, UNTRAINED, append_record
from tandem.metrics.timing import Timeline
from tandem.roles import DataPlane, Engine, Environment, Sink, Trainer
from tandem.rollout.groups import GroupRollOut
from tandem.types import Sample, Sampling
from tandem.weights.publisher import Publisher

VALIDATION_SEED_SHIFT = 1  # validation prompts are drawn and sampled under another seed than training's


@dataclass
class House:
    """The roles of a run. They live as long as the machinery does."""

    machinery: Machinery
    chat: Chat
    train_set: Prompts | None  # None: a house that only evaluates
    validation_sets: Mapping[str, Prompts]
    engine: Engine
    env: Environment
    plane: DataPlane
    architecture: str
    cast: Cast
    models: dict[str, Trainer] = field(default_factory=dict)


async def build_house(config: Config, machinery: Machinery, *, trains: bool = True, cast: Cast = AS_BUILT) -> House:
    """Load data and tokenizer, start plane and engine: all that evaluation needs. Bad input is refused here.

    Without `trains` the training data are not looked at. `cast` says who stands in for whom.
    """
    policy = config.policy
    tokenizer = load_tokenizer(policy.tokenizer.name or policy.model_name, trust_remote_code=policy.trust_remote_code)
    tools = described_tools(config)
    chat = Chat(tokenizer, policy.tokenizer, system_prompt=config.data.system_prompt, tools=tools)
    env = build_environment(config, chat, cast)
    train_set = train_prompts(config, chat) if trains else None
    validation_sets = {name: validation_prompts(config, chat, name) for name in config.data.validation_sets}
    shape = shape_of(policy.model_name, trust_remote_code=policy.trust_remote_code)
    check_length(config, shape.config.get_text_config().max_position_embeddings)
    plane = await machinery.start_plane()
    engine = cast.engine(await machinery.start_engine(chat.pad_token_id))
    return House(machinery, chat, train_set, validation_sets, engine, env, plane, architecture_of(shape), cast)


def check_length(config: Config, positions: int) -> None:
    """Refuse sequences that the model has no positions for."""
    if config.policy.max_total_sequence_length > positions:
        raise ValueError(
            f"policy.max_total_sequence_length={config.policy.max_total_sequence_length} is more than the {positions} "
            f"positions of {config.policy.model_name}; set policy.max_total_sequence_length={positions} or less"
        )


def train_prompts(config: Config, chat: Chat) -> Prompts:
    """The training prompts, encoded and checked."""
    train = config.data.train
    weights = train.weights if isinstance(train, MixtureData) else None
    return prompts(config, chat, train, "data.train", shuffle=config.data.shuffle, weights=weights)


def validation_prompts(config: Config, chat: Chat, name: str) -> Prompts:
    """The prompts of one validation set, encoded and checked."""
    key = f"data.validation.sets.{name}" if name else "data.validation"
    return prompts(config, chat, config.data.validation_sets[name], key, shuffle=False)


def prompts(
    config: Config,
    chat: Chat,
    source: Source | MixtureData,
    key: str,
    *,
    shuffle: bool,
    weights: Mapping[str, float] | None = None,
) -> Prompts:
    """The prompts of the source at `key`."""
    data = config.data
    rows = rows_of(source, config.seed, on_bad_row=data.on_bad_row, key=key)
    if config.verifier is not None:
        check_answers(config.verifier, ((row.id, row.answer) for row in rows))
    return Prompts(
        rows,
        chat.encode,
        template=data.prompt_template,
        shuffle=shuffle,
        seed=config.seed,
        max_prompt_tokens=config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens,
        on_too_long=data.on_too_long,
        weights=weights,
    )


def sampling_of(config: Config, chat: Chat, *, validation: bool) -> Sampling:
    """The law of training rollouts, or of validation answers."""
    generation = config.policy.generation
    return Sampling(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.val_temperature if validation else generation.temperature,
        seed=config.seed + VALIDATION_SEED_SHIFT * validation,
        stop_token_ids=(chat.eos_token_id, *generation.stop_token_ids),
        stop_strings=generation.stop_strings,
        top_k=None if validation else generation.top_k,
        top_p=generation.val_top_p if validation else generation.top_p,
    )


def build_evaluator(config: Config, house: House, answers: Path) -> Evaluator | None:
    """The validation of a run, or None without validation data."""
    if not house.validation_sets:
        return None
    roll_out = GroupRollOut(
        env=house.env,
        engine=house.engine,
        plane=house.plane,
        samples=config.algorithm.num_val_generations_per_prompt,
        sampling=sampling_of(config, house.chat, validation=True),
        timeout_s=config.policy.generation.timeout_s,
        need_spread=False,
    )

    def play(prompt) -> Awaitable[list[Sample]]:
        return roll_out.play(prompt, attempt=0)

    return Evaluator(
        house.validation_sets,
        play,
        max_samples=config.algorithm.max_val_samples,
        batch=config.algorithm.val_batch_size,
        answers=answers,
    )


async def build_algorithm(config: Config, house: House, span: Callable) -> PPO:
    """The trainers that the recipe asks for, and the algorithm over them."""
    house.models |= await house.machinery.start_trainers(house.plane)
    house.models["actor"] = house.cast.actor(house.models["actor"])
    traced = config.logger.flight_recorder is not None
    return algorithm_over(config, house.plane, house.models, span=span, traced=traced)


def algorithm_over(
    config: Config, plane: DataPlane, models: Mapping[str, Trainer], *, span: Callable, traced: bool
) -> PPO:
    """The recipe's algorithm over these trainers."""
    return PPO(
        config.algorithm,
        config.loss_fn,
        mini_batch=config.policy.train_global_batch_size,
        max_new_tokens=config.policy.generation.max_new_tokens,
        seed=config.seed,
        plane=plane,
        actor=models["actor"],
        critic=models.get("critic"),
        reference=models.get("reference"),
        span=span,
        streaming=config.async_rl.min_groups_for_streaming_train is not None,
        traced=traced,
    )


async def build_controller(
    config: Config, house: House, *, run_dir: Path, timeline: Timeline, sinks: Sequence[Sink]
) -> tuple[Controller, Checkpoints]:
    """The loop with all its roles, and what saves it."""
    assert house.train_set is not None, "a house that trains"
    algorithm = await build_algorithm(config, house, timeline.span)
    checkpoints = Checkpoints(
        run_dir / "checkpoints",
        models={name: model for name, model in house.models.items() if name != "reference"},
        plane=house.plane,
        identity=identity_of(config, house, len(house.train_set)),
        settings=config.checkpointing,
        config_yaml=to_yaml(config),
    )
    roll_out = GroupRollOut(
        env=house.env,
        engine=house.engine,
        plane=house.plane,
        samples=config.algorithm.num_generations_per_prompt,
        sampling=sampling_of(config, house.chat, validation=False),
        timeout_s=config.policy.generation.timeout_s,
        need_spread=config.algorithm.use_dynamic_sampling,
        traced=config.logger.flight_recorder is not None,
    )
    controller = Controller(
        plan_of(config, len(house.train_set)),
        algorithm=algorithm,
        dataset=house.train_set,
        roll_out=roll_out,
        buffer=Buffer(build_sampler(config.async_rl.sampler)),
        plane=house.plane,
        sync=Publisher(
            house.machinery.carrier(),
            [house.engine],
            pause=config.async_rl.pause,
            recompute_kv=config.async_rl.recompute_kv_cache_after_weight_updates,
        ),
        gpus=house.machinery.gpus(),
        evaluate=build_evaluator(config, house, run_dir / "validation"),
        save=checkpoints.save if config.checkpointing.enabled else None,
        clock=timeline,
        sinks=sinks,
        accounts=Accounts(partial(append_record, run_dir / UNTRAINED)),
        health=build_health(config, run_dir),
        recorder=build_recorder(config, house.plane, run_dir),
    )
    return controller, checkpoints


def build_health(config: Config, run_dir: Path) -> HealthWatch | None:
    """What judges every step, or None where the recipe switches it off."""
    sampler = config.async_rl.sampler
    facts = Facts(
        algorithm="ppo" if config.ppo else "grpo",
        groups_per_step=config.algorithm.num_prompts_per_step,
        runs_ahead=config.generates_while_training,
        max_staleness=sampler.max_staleness_versions if isinstance(sampler, WeightFifo | Windowed) else None,
    )
    settings = config.logger.health
    return HealthWatch(settings, facts, partial(append_record, run_dir / HEALTH)) if settings.enabled else None


def build_recorder(config: Config, plane: DataPlane, run_dir: Path) -> FlightRecorder | None:
    """What keeps every trained token, where the recipe asks for it."""
    settings = config.logger.flight_recorder
    return FlightRecorder(run_dir / FLIGHT, max_bytes=settings.max_bytes, plane=plane) if settings else None


def identity_of(config: Config, house: House, prompts_per_epoch: int) -> Identity:
    """What a resumed run must share with its checkpoint, and what it may change."""
    algorithm, section = config.algorithm, "ppo" if config.ppo else "grpo"
    return Identity(
        exact={
            "seed": config.seed,
            "algorithm": section,
            f"{section}.adv_estimator.name": algorithm.adv_estimator.name,
            f"{section}.num_prompts_per_step": algorithm.num_prompts_per_step,
            f"{section}.num_generations_per_prompt": algorithm.num_generations_per_prompt,
            f"{section}.ppo_epochs": algorithm.ppo_epochs,
            "policy.train_global_batch_size": config.policy.train_global_batch_size,
            "the policy's architecture": house.architecture,
            "the tokenizer": house.chat.fingerprint,
            "data.train": config.data.train.model_dump(mode="json"),
            "data.shuffle": config.data.shuffle,
            "prompts in an epoch": prompts_per_epoch,
        },
        free={
            "async_rl.sampler": config.async_rl.sampler.model_dump(mode="json"),
            f"{section}.max_num_steps": algorithm.max_num_steps,
            "policy.optimizer": config.policy.optimizer.model_dump(mode="json"),
            "value.optimizer": config.value.optimizer.model_dump(mode="json") if config.value else None,
        },
    )


def plan_of(config: Config, prompts_per_epoch: int) -> Plan:
    """The controller's sizes."""
    algorithm = config.algorithm
    return Plan(
        groups_per_step=algorithm.num_prompts_per_step,
        max_num_steps=algorithm.max_num_steps,
        max_num_prompts=algorithm.max_num_epochs * prompts_per_epoch,
        policy_training_start_step=config.policy_training_start_step,
        async_rl=config.async_rl,
        failures=config.failures,
        dynamic_sampling_max_gen_batches=algorithm.dynamic_sampling_max_gen_batches,
        val_period=algorithm.val_period,
        val_at_start=algorithm.val_at_start,
        val_at_end=algorithm.val_at_end,
        save_period=config.checkpointing.save_period,
        save_at_end=config.checkpointing.save_at_end,
    )
