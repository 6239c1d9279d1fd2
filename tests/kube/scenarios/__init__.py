"""Scenarios in their order: the first ones run on fewer nodes."""

from __future__ import annotations

from tests.kube.scenarios import faults, onboarding, page, removal, trial, upgrade
from tests.kube.stage import Scenario

SCENARIOS: dict[str, Scenario] = {
    "trial-one-node": trial.on_one_node,
    "install-page": page.word_for_word,
    "trial-three-nodes": trial.on_three_nodes,
    "upgrade": upgrade.under_load,
    "upgrade-from-first": upgrade.from_first_chart,
    "power-loss": faults.power_loss,
    "partition": faults.partition,
    "onboarding": onboarding.from_values,
    "removal": removal.leaves_only_data,
    "drain": faults.drain,
    "scale-out": faults.scale_out,
}
