from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edgees.config import SETTINGS, Config, describe, differences, duration, load, to_toml
from edgees.errors import UsageError


def refused(**overrides: object) -> str:
    with pytest.raises(UsageError) as info:
        load(None, overrides)
    assert info.value.exit_code == 2
    return f"{info.value.message} | {info.value.hint}"


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "m.gguf"\nsigma-end = 0.25\npairs = 4\ntime = "15m"\nreward = "exact"\n')
    config = load(file, {"pairs": 7, "seed": None})
    assert (config.model, config.sigma_end, config.pairs, config.time) == ("m.gguf", 0.25, 7, 900.0)
    assert config.reward == ("exact",)
    assert config.seed == 0 and "seed" not in config.given
    assert config.given == {"model", "sigma_end", "pairs", "time", "reward"}


def test_yaml_gives_the_same_config_as_toml(tmp_path: Path) -> None:
    toml, yaml = tmp_path / "a.toml", tmp_path / "a.yaml"
    toml.write_text('sigma = 1e-3\nshrink = false\nreward = ["a.py:f", "exact"]\nlr = 1\n')
    yaml.write_text("sigma: 1e-3\nshrink: no\nreward: [a.py:f, exact]\nlr: 1\n")
    assert load(toml) == load(yaml)
    assert load(yaml).sigma == 0.001  # PyYAML reads 1e-3 as text
    assert load(yaml).shrink is False
    assert isinstance(load(yaml).lr, float)


def test_unknown_name_gets_the_nearest_one(tmp_path: Path) -> None:
    file = tmp_path / "typo.toml"
    file.write_text("generatoins = 3\n")
    with pytest.raises(UsageError) as info:
        load(file)
    assert str(file) in info.value.message and "generatoins" in info.value.message
    assert info.value.hint == "did you mean generations?"


def test_members_suffice_for_their_groups() -> None:
    """A task's own groups give way to the user's number of members; groups that he set himself are refused."""
    defaults = {"pairs": 64, "groups": 4}
    assert load(None, {}).with_defaults(defaults).groups == 4
    assert load(None, {"pairs": 5}).with_defaults(defaults).groups == 2
    assert load(None, {"pairs": 5, "antithetic": True}).with_defaults(defaults).groups == 4
    assert load(None, {"pairs": 1, "antithetic": True}).with_defaults(defaults).groups == 1
    assert "too few for groups = 3" in refused(pairs=5, groups=3)
    assert "compared with the others" in refused(pairs=1)


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("pairs", 0, "at least 1"),
        ("pairs", 1.5, "whole number"),
        ("pairs", True, "number"),
        ("sigma", -0.1, "at least 0"),
        ("sigma", float("nan"), "finite"),
        ("sigma", "big", "number"),
        ("sigma_end", 0, "more than 0"),
        ("noise", "uniform", "sign, lowrank, normal"),
        ("device", "tpu", "cuda:NUMBER"),
        ("device", "cuda:128", "cuda:NUMBER"),  # torch would read -128
        ("bits", 3, "2, 4, 8"),
        ("time", "soon", "15m"),
        ("shrink", "maybe", "true or false"),
        ("reward", 3, "text"),
        ("max_invalid", 2, "at most 1"),
        ("params", "(", "regular expression"),
        ("amplitudes", ("self_attn",), "PATTERN=FACTOR"),
        ("amplitudes", ("mlp=2", "(=2"), "PATTERN=FACTOR"),
        ("amplitudes", ("mlp=0",), "PATTERN=FACTOR"),
    ],
)
def test_bad_values_name_key_and_value(key: str, value: object, needed: str) -> None:
    text = refused(**{key: value})
    assert key in text and needed in text and "command line" in text


def test_settings_that_contradict_each_other() -> None:
    assert "lowrank" in refused(scope="adapter", noise="sign")
    assert "factors = 2" in refused(scope="adapter", rank=3, factors=2)
    assert "loglik_end" in refused(loglik_hold=0.9, loglik_end=0.1)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.toml", "= 3", "not valid TOML"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.yaml", "- 1\n- 2\n", "list"),
        ("a.json", "{}", ".toml"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: str, told: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=told) as info:
        load(tmp_path / name)
    assert name in info.value.message
    with pytest.raises(UsageError, match=r"missing\.toml"):
        load(tmp_path / "missing.toml")


def test_durations() -> None:
    assert [duration(t) for t in (90, "90", "90s", "15m", "1h", "1h30m", "0.5h")] == [
        90, 90, 90, 900, 3600, 5400, 1800,
    ]  # fmt: skip
    for bad in ("", "m", "15 minutes", "-5s"):
        with pytest.raises(ValueError):
            duration(bad)


def test_toml_round_trip_of_odd_values(tmp_path: Path) -> None:
    config = load(
        None,
        {
            "system": 'say "hi"\n\ttab \\ ü 🦙 \x7f',
            "reward": ("a b.py:f", "exact"),
            "sigma": 0.1 + 0.2,
            "seed": 2**63 - 1,
            "time": 0.1,
            "drift_budget": 1e-9,
            "sigma_abs": 1e-3,
        },
    )
    file = tmp_path / "config.resolved.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    again = load(file)
    assert again == config
    assert differences(config, again) == []
    assert again.given >= set(SETTINGS) - {"sigma_abs"}
    file.write_text(to_toml(Config()), encoding="utf-8")
    assert load(file) == Config()


def test_every_setting_is_documented_and_frozen() -> None:
    for name in SETTINGS:
        assert len(describe(name)) > 10
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().pairs = 3  # type: ignore[misc]
    assert "[default: 32]" in describe("pairs")


def test_differences_name_old_and_new() -> None:
    a, b = load(None, {"pairs": 4, "threads": 1}), load(None, {"pairs": 6, "threads": 2})
    assert differences(a, b) == ["threads: 1 -> 2", "pairs: 4 -> 6"]
    assert differences(a, b, free=False) == ["pairs: 4 -> 6"]
    assert differences(a.public(False), b, free=False) == ["pairs: 4 -> 6"]


def test_task_defaults_fill_only_what_is_open() -> None:
    config = load(None, {"pairs": 4}).with_defaults({"pairs": 99, "rows": 5, "generations": 12})
    assert (config.pairs, config.rows, config.max_generations) == (4, 5, 12)
    assert load(None, {"time": "5m"}).with_defaults({"generations": 12}).max_generations is None
    assert load(None, {"generations": 3}).with_defaults({"time": 60.0}).time == 0
    assert Config().max_generations == 10


def test_paths_in_a_file_lie_beside_it(tmp_path: Path) -> None:
    for name in ("score.py", "rows.jsonl", "m.gguf"):
        (tmp_path / name).write_text("")
    file = tmp_path / "run.toml"
    file.write_text(
        'task = "jsonl:rows.jsonl"\nreward = ["score.py:f", "exact"]\nmodel = "m.gguf"\neval_data = "no.jsonl"\n'
    )
    config = load(file)
    assert config.task == f"jsonl:{tmp_path / 'rows.jsonl'}"
    assert config.reward == (f"{tmp_path / 'score.py'}:f", "exact")
    assert config.model == str(tmp_path / "m.gguf")
    assert config.eval_data == "no.jsonl"
    assert load(None, {"model": "m.gguf"}).model == "m.gguf"


def test_paths_are_made_absolute_and_compared_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("score.py", "rows.jsonl", "m.gguf", "home", "exact"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    settings = {"task": "jsonl:rows.jsonl", "reward": ("score.py:f*0.5", "exact", "no.py"), "model": "m.gguf"}
    config = load(None, settings).absolute()
    assert config.task == f"jsonl:{tmp_path}/rows.jsonl" and config.model == f"{tmp_path}/m.gguf"
    assert config.reward == (f"{tmp_path}/score.py:f*0.5", "exact", "no.py")
    assert load(None, {}).absolute() == Config()  # the task home is no file, whatever lies there
    assert config.public(free=False)["reward"] == ["score.py:f*0.5", "exact", "no.py"]
    assert differences(config.public(free=False), load(None, settings), free=False) == []
    other = load(None, {**settings, "task": "jsonl:others.jsonl", "model": "other.gguf", "threads": 3})
    assert differences(config.public(free=False), other, free=False) == [
        'task: "jsonl:rows.jsonl" -> "jsonl:others.jsonl"'
    ]
    assert "model" not in config.public(free=False) and "run" not in config.public(free=False)
