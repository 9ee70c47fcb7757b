"""Adapters for packages of text games, each with ``reset(seed)`` and ``step(text)``; run inside the child only."""

from __future__ import annotations

import difflib
import functools
import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any


class Refused(Exception):
    """What was asked for is not there or cannot be played; ``hint`` says what can be done."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def prepare(options: Mapping[str, Any]) -> tuple[Callable[..., Any], str, list[str] | None]:
    """(constructor, its name, parameters it takes: None for any)."""
    kind, name = options["kind"], options["name"]
    if kind == "textarena":
        return prepare_textarena(name, options["parameters"])
    if kind == "gymnasium":
        return prepare_gymnasium(name)
    taken = ["world_size", "nb_objects", "quest_length", "nb_parallel_quests", "choices", "progress", "max_turns"]
    return functools.partial(TextWorld, name, options["folder"]), "textworld", taken


# -- textarena ----------------------------------------------------------------------------------------------------

_WAYS = ("one of [up], [down], [left], [right]", r"\b(up|down|left|right)\b")
_PLACE = r"(\d+)\D{1,5}(\d+)"
FORMS: dict[str, tuple[str, str]] = {
    "2048": _WAYS,
    "Blackjack": ("[Hit] or [Stand]", r"\b(hit|stand)\b"),
    "FifteenPuzzle": _WAYS,
    "FrozenLake": _WAYS,
    "GuessTheNumber": ("one number in square brackets, such as [7]", r"(\d+)"),
    "LightsOut": ("row and column in square brackets, such as [0 2]", _PLACE),
    "Mastermind": ("the digits in square brackets, such as [2 1 4 3]", r"(\d)\W+(\d)\W+(\d)\W+(\d)"),
    "PegJump": ("two holes in square brackets, such as [4 1]", _PLACE),
    "Secretary": ("[accept] or [continue]", r"\b(accept|continue)\b"),
    "Sokoban": _WAYS,
    "ThreeCardMonte": ("the number of a cup in square brackets, such as [0]", r"(\d+)"),
    "TowerOfHanoi": ("two towers in square brackets, such as [A C]", r"\b([ABC])\b\W+(?:to\W+)?\b([ABC])\b"),
}
"""What the model is told about an action, and what is taken for one in a reply that has no square brackets."""
LISTED = ("2048", "Blackjack", "FifteenPuzzle", "FrozenLake", "Secretary", "Sokoban")
"""Games of which that list is complete."""
SHORT = {
    "GuessTheNumber": "Guess the number between {min_number} and {max_number}. "
    "After each guess you are told whether it is higher or lower."
}
"""Rules that say the same as the game's own, in fewer words."""
OFFLINE = "GuessTheNumber-v0, FrozenLake-v0, TowerOfHanoi-v0, Mastermind-v0, Blackjack-v0, 2048-v0, Sokoban-v0"
MOST_TURNS = 20
MOST_ACTIONS = 100
"""Actions that are listed one by one."""


def prepare_textarena(name: str, parameters: Mapping[str, Any]) -> tuple[Callable[..., Any], str, list[str] | None]:
    import inspect

    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        near = difflib.get_close_matches(name, [key for key in ENV_REGISTRY if not key.endswith(("-raw", "-train"))], 3)
        hint = f"Did you mean {', '.join(near)}?" if near else f"For one player, for example: {OFFLINE}."
        raise Refused(f"textarena has no environment {name!r}", hint)
    plain = name if name.endswith("-raw") or f"{name}-raw" not in ENV_REGISTRY else f"{name}-raw"
    try:
        game = textarena.make(plain)
        taken = [key for key in inspect.signature(type(game).__init__).parameters if key != "self"]
        arguments = {key: value for key, value in parameters.items() if key in taken}
        trial = textarena.make(plain, **arguments)
        trial.reset(num_players=1, seed=0)
        assert isinstance(trial.state, textarena.SinglePlayerState), "the number of players has to be 2 or more"
    except Exception as error:
        lines = [line.strip(" *") for line in str(error).splitlines()]
        what = " ".join(line for line in lines if line)[:300]
        hint = f"For one player and without a network there are, for example, {OFFLINE}."
        if "number of players" in what.lower() or isinstance(error, AssertionError):
            hint = f"It is a game for several players. {hint}"
        elif isinstance(error, LookupError) and "nltk" in what.lower():
            hint = f"It needs data of the package nltk, which is fetched once from the network as the text says. {hint}"
        raise Refused(f"textarena's {name} cannot be played here: {type(error).__name__}: {what}", hint) from error
    return functools.partial(TextArena, plain), f"textarena {name}", [*taken, "error_allowance"]


class TextArena:
    """A single-player game of textarena.

    The reward is the game's own; where the game has not ended it is the share it says is done, or 0. The game ends at
    the second invalid move in a row, as textarena has it (``error_allowance`` = 1).
    """

    max_tokens = 32

    def __init__(self, name: str, error_allowance: int | None = None, **parameters: Any) -> None:
        import textarena

        self.game = textarena.make(name, **parameters)
        self.max_turns = min(int(getattr(self.game, "max_turns", None) or MOST_TURNS), MOST_TURNS)
        if "max_turns" in parameters:
            self.max_turns = int(parameters["max_turns"])
        self.allowance = error_allowance
        self.base = name.split("-")[0]
        self.form, self.pattern = FORMS.get(self.base, ("one action in square brackets", ""))
        self.refused = ""

    @property
    def actions(self) -> list[str] | None:
        """Replies that are possible, of games where these are few; None: they are many."""
        if self.base in LISTED:
            return re.findall(r"\[\w+\]", self.form)
        if self.base == "GuessTheNumber" and self.game.max_number - self.game.min_number < MOST_ACTIONS:
            return [f"[{number}]" for number in range(self.game.min_number, self.game.max_number + 1)]
        return None

    def reset(self, seed: int) -> str:
        self.game.reset(num_players=1, seed=seed)
        state = self.game.state
        if self.allowance is not None:
            state.error_allowance = self.allowance
        refuse = state.set_invalid_move

        def refuse_in_order(reason: Any = None, reward: Any = -1.0) -> None:
            if isinstance(reward, str) and not isinstance(reason, str):
                reason, reward = reward, reason  # some games of 0.7 give the two the other way round
            self.refused = str(reason)
            refuse(reason=reason, reward=reward)

        state.set_invalid_move = refuse_in_order
        return self._observation()

    def _observation(self) -> str:
        observed = self.game.get_observation()[1]
        if isinstance(observed, str):
            texts = [observed]
        else:
            kinds = [(getattr(kind, "name", ""), str(text)) for _, text, kind in observed]
            texts = [
                SHORT[self.base].format(**vars(self.game)) if kind == "PROMPT" and self.base in SHORT else text
                for kind, text in kinds
                if kind not in ("PLAYER_ACTION", "GAME_ADMIN")
            ]
        if self.refused:
            texts.append(f"That was not valid: {self.refused}")
        return "\n".join([*(text.strip() for text in texts), f"Answer with {self.form}."])

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.refused = ""
        bracketed = re.search(r"\[[^\[\]]*\]", text)
        found = re.search(self.pattern, text, re.IGNORECASE) if self.pattern else None
        if bracketed:
            action = bracketed.group()
        else:
            action = f"[{' '.join(found.groups()) if found else text}]"
        done, _ = self.game.step(action)
        state = self.game.state
        if done:
            observation = str(state.game_info[0].get("reason", ""))
        else:
            observation = self._observation()
        return observation, 0.0, bool(done), {"invalid": bool(self.refused)}

    def get_reward(self) -> Any:
        rewards = self.game.state.rewards
        if not rewards:
            for name in ("_get_percentage_completion", "_calculate_progress", "_progress"):
                if hasattr(self.game, name):
                    return getattr(self.game, name)()
            return 0.0
        value = rewards.get(0)
        if isinstance(value, str) and re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", value):
            return float(value)
        return value


# -- textworld ----------------------------------------------------------------------------------------------------


class TextWorld:
    """A game of TextWorld: from a file, or generated from the row's seed.

    choices: the model answers with the number of one of the commands that are possible now; else it types a command.
    The reward is score / max_score; with ``progress`` it is the mean of that and of the share of the winning walk that
    is done, for models that hardly ever win.
    """

    max_tokens = 16

    def __init__(
        self,
        file: str,
        folder: str,
        world_size: int = 2,
        nb_objects: int = 4,
        quest_length: int = 2,
        nb_parallel_quests: int = 1,
        choices: bool = True,
        progress: bool = False,
        max_turns: int | None = None,
    ) -> None:
        self.file, self.folder = file, folder
        self.size = {
            "nb_rooms": world_size,
            "nb_objects": nb_objects,
            "quest_length": quest_length,
            "nb_parallel_quests": nb_parallel_quests,
        }
        for name, value in self.size.items():
            if type(value) is not int or value < 1:
                name = "world_size" if name == "nb_rooms" else name
                raise Refused(f"{name} of textworld must be a whole number of at least 1, not {value!r}", "Such as 2.")
        if file and not os.path.isfile(file):
            raise Refused(f"no such game file: {file}", "Leave the name out for generated games: textworld:?seed=1.")
        self.choices, self.progress = choices, progress
        self.max_turns = max_turns or max(8, 3 * quest_length * nb_parallel_quests)
        if max_turns is None and file:
            self.max_turns = 30
        self.commands: list[str] = []
        self.game: Any = None

    @property
    def actions(self) -> list[str]:
        """Replies that are possible."""
        return [str(number) for number, _ in enumerate(self.commands, 1)] if self.choices else self.commands

    def _generated(self, seed: int) -> str:
        """The file of the game of this seed, made once for all members."""
        import textworld

        place = os.path.join(self.folder, str(seed))
        if not os.path.isdir(place):
            half = f"{place}.half"
            shutil.rmtree(half, ignore_errors=True)
            os.makedirs(half)
            options = textworld.GameOptions()
            options.seeds = seed % 2**31
            options.path = os.path.join(half, "game.z8")
            for name, value in self.size.items():
                setattr(options, name, value)
            game = textworld.generator.make_game(options)
            textworld.generator.compile_game(game, options)
            os.replace(half, place)  # a child that is killed while it generates leaves no half a game
        return os.path.join(place, "game.z8")

    def reset(self, seed: int) -> str:
        import textworld

        wanted = textworld.EnvInfos(
            admissible_commands=True, max_score=True, score=True, won=True, objective=True, description=True,
            inventory=True, policy_commands=True, feedback=True,
        )  # fmt: skip
        self.game = textworld.start(self.file or self._generated(seed), wanted)
        self.game.seed(seed % 2**31)  # or the interpreter's own generator starts from the time
        self.state = self.game.reset()
        self.longest = len(self.state.policy_commands or ())
        return self._observation(first=True)

    def _observation(self, first: bool = False, feedback: str = "") -> str:
        state = self.state
        commands = sorted(state.admissible_commands or ())
        # The room and what is carried are told every time, and no quest of a generated game asks to examine a thing.
        useless = r"look|inventory" if self.file else r"look|inventory|examine .*"
        self.commands = [command for command in commands if not re.fullmatch(useless, command)]
        room = _plain(state.description)
        told = _plain(state.objective if first else feedback)
        texts = [told] if told != room else []  # walking somewhere answers with the room
        texts += [room, _plain(state.inventory)]
        if self.choices:
            texts += [f"{number}. {command}" for number, command in enumerate(self.commands, 1)]
            texts.append("Answer with the number of one action.")
        else:
            texts.append("Answer with one command, such as: " + (self.commands[0] if self.commands else "look"))
        return "\n".join(text for text in texts if text)

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        command, invalid = text.strip().splitlines()[0] if text.strip() else "", False
        if self.choices:
            number = re.search(r"\d+", text)
            index = int(number.group()[:6]) if number else 0
            if not 1 <= index <= len(self.commands):
                message = f"Not valid: answer with a number from 1 to {len(self.commands)}."
                return f"{message}\n{self._observation()}", 0.0, False, {"invalid": True}
            command = self.commands[index - 1]
        else:
            invalid = command not in (self.state.admissible_commands or ())
        self.state, _, done = self.game.step(command[:200] or "look")
        feedback = self.state.feedback or ""
        if done:
            return _plain(feedback.partition("***")[0]), 0.0, True, {"invalid": invalid}
        return self._observation(feedback=feedback), 0.0, False, {"invalid": invalid}

    def get_reward(self) -> float:
        score = float(self.state.score or 0) / max(float(self.state.max_score or 0), 1.0)
        if not self.progress:
            return score
        left = 0 if self.state.won else len(self.state.policy_commands or ()) or self.longest
        return (score + max(0.0, 1 - left / max(self.longest, 1))) / 2

    def metrics(self) -> dict[str, float]:
        return {"won": float(bool(self.state.won))}

    def close(self) -> None:
        if self.game is not None:
            self.game.close()


def _plain(text: str | None) -> str:
    """A text of the game without banners, prompts and empty lines."""
    lines = [line.strip() for line in (text or "").splitlines()]
    kept = [line for line in lines if line and not line.startswith((">", "-=")) and re.search(r"[A-Za-z]{2}", line)]
    return " ".join(line for line in kept if not re.search(r"\\\$|\$\$|\|  ", line))


# -- gymnasium ----------------------------------------------------------------------------------------------------


def prepare_gymnasium(name: str) -> tuple[Callable[..., Any], str, list[str] | None]:
    import gymnasium

    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(name, list(gymnasium.registry), 3)
        hint = f"Did you mean {', '.join(near)}?" if near else "A module that registers it goes in front: MODULE:ID."
        raise Refused(f"gymnasium has no environment {name!r}: {error}", hint) from error
    return functools.partial(Gymnasium, name), f"gymnasium {name}", None


class Gymnasium:
    """An environment of gymnasium whose actions are texts or whole numbers.

    Observations that are no text are shown as the environment draws itself where it can (render_mode=ansi).
    """

    def __init__(self, name: str, **parameters: Any) -> None:
        import gymnasium

        try:
            self.env = gymnasium.make(name, **parameters)
        except TypeError as error:
            raise Refused(f"gymnasium's {name} refuses {parameters}: {error}", "See its documentation.") from error
        except gymnasium.error.DependencyNotInstalled as error:
            raise Refused(
                f"gymnasium's {name} needs another package: {error}", "Install it as the text says."
            ) from error
        space = self.env.action_space
        self.discrete = isinstance(space, gymnasium.spaces.Discrete)
        if not self.discrete and not isinstance(space, gymnasium.spaces.Text):
            raise Refused(
                f"the actions of gymnasium's {name} are {space}, which a text model cannot give",
                "Environments with Text or Discrete actions can be played.",
            )
        self.drawn = self.env.render_mode == "ansi"
        self.first = int(getattr(space, "start", 0))
        self.count = int(getattr(space, "n", 0))
        self.actions = [str(self.first + i) for i in range(self.count)] if 0 < self.count <= MOST_ACTIONS else None

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed)
        return self._shown(observation), info

    def _shown(self, observation: Any) -> str:
        text = observation if isinstance(observation, str) or not self.drawn else self.env.render()
        form = f"\nAnswer with a number from {self.first} to {self.first + self.count - 1}." if self.discrete else ""
        return re.sub(r"\x1b\[4\d;?\d*m(.*?)\x1b\[0m", r"(\1)", str(text)).strip() + form

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        action: Any = text
        if self.discrete:
            number = re.search(r"\d+", text)
            action = int(number.group()[:9]) if number else -1
            if not self.env.action_space.contains(action):
                last = self.first + self.count - 1
                return (
                    f"Not valid: answer with a number from {self.first} to {last}.",
                    0.0,
                    False,
                    False,
                    {"invalid": True},
                )
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._shown(observation), float(reward), terminated, truncated, {**info}

    def close(self) -> None:
        self.env.close()
