"""Who has which GPUs."""

from pathlib import Path

import pytest

from tandem.config.load import load
from tandem.config.placement import Slot, placement_of

BASE = str(Path(__file__).with_name("base.yaml"))
KL = ("loss_fn.reference_policy_kl_penalty=0.1", "reference={}")


def places(*overrides: str) -> dict[str, list[tuple[int, int]]]:
    config = load(BASE, ["cluster.launch=ray", *overrides]).config
    return {part: [(slot.node, slot.place) for slot in slots] for part, slots in placement_of(config).items()}


def test_all_share_all_slots_by_default():
    everywhere = [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = places("cluster.num_nodes=2", "cluster.gpus_per_node=2", *KL)
    assert found == dict.fromkeys(("engine", "critic", "actor", "reference"), everywhere)


def test_engines_take_a_nodes_last_gpus():
    apart = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 3}}"
    found = places("cluster.gpus_per_node=4", apart)
    assert found == {"engine": [(0, 1), (0, 2), (0, 3)], "critic": [(0, 0)], "actor": [(0, 0)]}


def test_engines_take_whole_nodes_and_the_critic_what_is_left_of_the_last():
    engines = "policy.generation.colocated={enabled: false, resources: {num_nodes: 2, gpus_per_node: 2}}"
    critic = "value.colocated={enabled: false, resources: {gpus_per_node: 1}}"
    found = places("cluster.num_nodes=4", "cluster.gpus_per_node=2", engines, critic)
    assert found == {
        "engine": [(2, 0), (2, 1), (3, 0), (3, 1)],
        "critic": [(1, 1)],
        "actor": [(0, 0), (0, 1), (1, 0)],
    }


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("gpus", [1, 2, 5])
def test_no_slot_is_had_twice_by_parts_that_do_not_share(nodes: int, gpus: int):
    sizes = (f"cluster.num_nodes={nodes}", f"cluster.gpus_per_node={gpus}")
    apart = ("policy.generation.colocated.enabled=false",) if nodes * gpus > 1 else ()
    found = places(*sizes, *apart)
    assert found["actor"] == found["critic"]
    assert len({*found["engine"], *found["actor"]}) == nodes * gpus
    assert not apart or not set(found["engine"]) & set(found["actor"])


def test_slots_are_in_order():
    assert sorted([Slot(1, 0), Slot(0, 1), Slot(0, 0)]) == [Slot(0, 0), Slot(0, 1), Slot(1, 0)]
