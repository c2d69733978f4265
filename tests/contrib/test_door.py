"""How rules of contrib are loaded, and what is said where they are not."""

import importlib
from pathlib import Path

import pytest
import toy_model

import dlm_jax
from dlm_jax import moved
from dlm_jax.cli import sample
from dlm_jax.contrib import decoders, remdm
from dlm_jax.sampling.rules import BUILT_IN, SLOTS, with_rules

HOMES = ("decoders", "remdm", "speculative", "constrained_waves", "drafts")
DOCS = Path(__file__).parent.parent.parent / "docs"
ASKED = {"gen_length": 8, "steps": 8, "seed": 3}


def _names(home):
    """The settings of a module's rules, and the values that select them."""
    table = with_rules(importlib.import_module(f"dlm_jax.contrib.{home}"))
    names = set(table.settings) - set(BUILT_IN.settings)
    for slot, (_, selector, _) in SLOTS.items():
        new = set(getattr(table, slot)) - set(getattr(BUILT_IN, slot))
        names |= {f"{selector}={name}" for name in new}
    return names


def test_each_name_of_a_module_is_known_to_the_errors():
    assert {name: home for home in HOMES for name in _names(home)} == moved._HOMES


def test_a_name_that_is_not_loaded_says_what_to_load(capsys, monkeypatch):
    said = "dlm_jax.contrib.decoders: pass --rules dlm_jax.contrib.decoders, or in Python rules="
    for settings in ({"order": "klass"}, {"klass_steps": 2}, {"remask": "wino"}):
        with pytest.raises(ValueError, match=f"^{next(iter(settings))}=.*{said}"):
            dlm_jax.generate(toy_model.MODEL, ["A "], **settings)
    monkeypatch.setattr(sample, "start_jax", lambda *args: None)
    for flags in (["--order", "klass"], ["--klass-steps", "2"]):
        with pytest.raises(SystemExit, match="2"):
            sample.main(["--prompt", "A", *flags])
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and said.removesuffix(", or in Python rules=") in err


def test_a_module_of_rules_an_object_and_a_list_are_the_same():
    def text(**settings):
        return dlm_jax.generate(toy_model.MODEL, ["A "], **ASKED | settings).texts[0]

    rule = decoders.LocalLeap(0.9, 0.3, 2)  # type: ignore[arg-type]
    named = {"order": "local_leap", "leap_threshold": 0.3, "leap_radius": 2}
    whole = text(rules=decoders, **named)
    assert whole == text(rules=[remdm, decoders.LocalLeap], **named) == text(commit=rule)


def test_the_program_loads_several_modules(capsys, monkeypatch):
    monkeypatch.setattr(sample, "start_jax", lambda *args: None)
    rules = "dlm_jax.contrib.decoders,dlm_jax.contrib.remdm"
    flags = ["--rules", rules, "--order", "klass", "--klass-steps", "1"]
    assert sample.main(["--prompt", "A", "--gen-length", "4", "--steps", "4", *flags]) == 0
    assert "order=klass" in capsys.readouterr().err


def test_the_harness_loads_a_module_by_its_name():
    from dlm_jax.harness.lm import DlmJax

    asked = {"rules": "dlm_jax.contrib.decoders", "order": "klass"}
    made = DlmJax(model=toy_model.MODEL, **asked)
    assert made._settings["rules"] is decoders


@pytest.mark.parametrize("home", HOMES)
def test_the_pages_name_every_rule_and_setting(home):
    pages = (DOCS / "contrib.md").read_text(encoding="utf-8")
    for name in _names(home):
        setting, _, value = name.partition("=")
        assert (f'{setting}="{value}"' if value else f"`{setting}`") in pages, name
