"""Rules of the health verdicts and the flight recorder, in the form of rule_cases.py."""

from tests.config.rule_cases import PPO

CASES = [
    (
        "health_levels",
        PPO,
        "logger.health.update_kl=[0.5,0.1]",
        "logger.health.update_kl=[0.1,0.5]",
        "update_kl = [0.5, 0.1]|at least the warning|update_kl=[0.1,0.5]",
    ),
    (
        "health_levels",
        PPO,
        "logger.health.critic_lags=[0,0.5]",
        "logger.health.critic_lags=[0.5,0]",
        "critic_lags = [0.0, 0.5]|at most the warning",
    ),
    (
        "flight_recorder",
        PPO,
        "cluster.launch=ray cluster.gpus_per_node=2 policy.backend.name=megatron value.backend.name=megatron"
        " logger.flight_recorder={}",
        "logger.flight_recorder=null",
        "logger.flight_recorder (|policy.backend.name = megatron|policy.backend.name=torch",
    ),
]
