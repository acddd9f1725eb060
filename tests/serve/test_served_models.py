"""What an ingress's requests may call the model, and which adapters are used."""

from __future__ import annotations

import pytest

from cluster.actors.adapter_set import AdapterSet
from cluster.wire.messages import FIRST_LOADED_ID, LoraAdapter
from serve.config import ApiSettings
from serve.served_models import ServedModels

SETTINGS = ApiSettings(
    served_model_name="large",
    other_model_names=("gpt",),
    adapter_names=("plain", "stable"),
    max_model_len=8,
)


def adapter(name: str, place: int = 0) -> LoraAdapter:
    return LoraAdapter(FIRST_LOADED_ID + place, name, "/path", b"")


def meanings(models: ServedModels) -> dict[str, tuple[str, int]]:
    return {name: (each.name, each.adapter_id) for name, each in models.by_name.items()}


@pytest.mark.feature("S10")
def test_names_mean_what_the_newest_answer_of_the_board_says() -> None:
    models = ServedModels(SETTINGS)
    fixed = {
        "large": ("large", 0),
        "gpt": ("large", 0),
        "plain": ("plain", 1),
        "stable": ("stable", 2),
    }
    assert meanings(models) == fixed and models.by_name.get("sql") is None
    models.see(AdapterSet(3, (adapter("sql"), adapter("gpt", 1), adapter("plain", 2))))
    loaded = meanings(models)
    assert loaded == {**fixed, "sql": ("sql", FIRST_LOADED_ID)}, "a name that was there stays"
    created = models.by_name.get("sql")
    models.see(AdapterSet(5, (adapter("sql"),)))
    assert models.by_name.get("sql") is created
    models.see(AdapterSet(6, (adapter("sql", 4),), (adapter("sql"),)))
    models.see(AdapterSet(5, (adapter("sql"),)))  # an answer that comes late
    assert models.by_name.get("sql") != created and models.revision == 6
    models.see(AdapterSet(7))
    assert meanings(models) == fixed
