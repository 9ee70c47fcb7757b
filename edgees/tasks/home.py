"""``home``: a spoken request for a device at home becomes one JSON tool call. The demo task.

    can you make the bedroom lights warmer?
    -> {"device": "light", "room": "bedroom", "state": "warm"}

The schema: ``device`` is one of :data:`STATES`, ``state`` one of its words or (heat) degrees as a number, ``room`` the
room's name. The model is told the keys and the devices and shown no example: the untuned SmolLM2-135M chats on.
In its tokens, prompts are about 54 long, of which all but the request are the same in every row, and calls 20.

Rows come from a seeded generator. Training and held-out rows share no sentence template (neither the way an action is
put nor the frame around it) and no call; the names of rooms are common to both, as nobody can guess those. Credit is
``json_fields``: 0.05 for a JSON object, up to 0.75 by field, 0.2 more for the exact call. Devices come in turn,
so that the best constant answer earns about 0.15 (0.13 to 0.18 on any part: tests/test_tasks.py).
"""

from __future__ import annotations

import json
import random

from edgees.tasks.reading import json_object, same
from edgees.tasks.rows import SEARCH, Row, Task

ROOMS = (
    "kitchen", "bedroom", "bathroom", "office", "hall", "lounge", "nursery", "garage", "attic", "cellar", "porch",
    "study", "pantry", "studio", "loft", "library",
)  # fmt: skip
DEGREES = tuple(range(16, 25))
STATES: dict[str, tuple[str | int, ...]] = {
    "light": ("on", "off", "dim", "bright", "warm", "cool"),
    "heat": DEGREES,
    "blind": ("open", "close", "half"),
    "music": ("jazz", "rock", "pop", "folk", "stop"),
    "fan": ("off", "low", "high"),
}
KEYS = ("device", "room", "state")
SYSTEM = 'Turn each request into JSON: {"device": "light, heat, blind, music or fan", "room": "...", "state": "..."}'
MAX_TOKENS = 32
TRAIN_ROWS, HELDOUT_ROWS = 1024, 192
MOST = {"train": 3 * 14 * 2 * 4, "heldout": 3 * 2 * 2 * 4}
"""Distinct requests for the device with the fewest: states x rooms x templates x frames."""

# How an action may be put: device -> state -> templates. {r} is the room, {d} the degrees.
_TRAIN: dict[str, dict[str, tuple[str, ...]]] = {
    "light": {
        "on": ("turn on the {r} lights", "switch the light in the {r} on"),
        "off": ("turn off the {r} lights", "switch the light in the {r} off"),
        "dim": ("dim the lights in the {r}", "make the {r} light a bit darker"),
        "bright": ("make the {r} lights as bright as they go", "brighten up the {r}"),
        "warm": ("make the {r} lights warmer", "set the {r} lamp to a warm tone"),
        "cool": ("make the {r} lights cooler", "set the {r} lamp to a cool tone"),
    },
    "heat": {
        "": ("set the {r} to {d} degrees", "warm the {r} up to {d}", "turn the {r} heating to {d} degrees"),
    },
    "blind": {
        "open": ("open the {r} blinds", "pull up the blind in the {r}"),
        "close": ("close the {r} blinds", "pull down the blind in the {r}"),
        "half": ("put the {r} blinds half way", "leave the blind in the {r} half open"),
    },
    "music": {
        "jazz": ("play some jazz in the {r}", "put jazz on in the {r}"),
        "rock": ("play some rock in the {r}", "put rock music on in the {r}"),
        "pop": ("play some pop in the {r}", "put pop songs on in the {r}"),
        "folk": ("play some folk in the {r}", "put folk music on in the {r}"),
        "stop": ("stop the music in the {r}", "cut the songs in the {r}"),
    },
    "fan": {
        "off": ("turn off the {r} fan", "stop the fan in the {r}"),
        "low": ("run the {r} fan on low", "set the fan in the {r} to slow"),
        "high": ("run the {r} fan on high", "set the fan in the {r} to fast"),
    },
}
_HELDOUT: dict[str, dict[str, tuple[str, ...]]] = {
    "light": {
        "on": ("I need light in the {r}", "get the {r} lamps on"),
        "off": ("the {r} should go dark, lights off", "kill the lights of the {r}"),
        "dim": ("the {r} is too glaring, lower the lights", "have the {r} lamps dimmed"),
        "bright": ("give me full light in the {r}", "the {r} lamps should be really bright"),
        "warm": ("I want a warmer glow in the {r}", "warm light for the {r}"),
        "cool": ("I want a cooler, whiter light in the {r}", "cool light for the {r}"),
    },
    "heat": {
        "": ("I'd like the {r} at {d} degrees", "heat the {r} so that it is {d}", "{d} degrees in the {r}"),
    },
    "blind": {
        "open": ("let the sun in, blinds of the {r} up", "I want the {r} blind opened"),
        "close": ("shut the blinds of the {r}", "I want the {r} blind closed"),
        "half": ("have the {r} blind at half", "the blinds of the {r} should be half down"),
    },
    "music": {
        "jazz": ("let me hear jazz in the {r}", "I'm in the {r} and feel like jazz"),
        "rock": ("let me hear rock in the {r}", "I'm in the {r} and feel like rock"),
        "pop": ("let me hear pop in the {r}", "I'm in the {r} and feel like pop"),
        "folk": ("let me hear folk in the {r}", "I'm in the {r} and feel like folk"),
        "stop": ("silence the speakers in the {r}", "I want quiet in the {r}, end the music"),
    },
    "fan": {
        "off": ("the {r} fan can go off", "I don't need the fan in the {r}, shut it down"),
        "low": ("a gentle breeze in the {r}, fan on low", "let the fan of the {r} turn slowly"),
        "high": ("full fan power in the {r}", "let the fan of the {r} spin at its highest"),
    },
}
# The frame around the action {a}.
_FRAMES = {
    "train": ("{a}", "please {a}", "{a} now", "can you {a}?"),
    "heldout": ("{a}, right away", "hey, {a}", "{a}, thanks", "quick: {a}"),
}


def is_heldout(state: int, room: int) -> bool:
    """Whether the call for the ``state``-th of all states in that room is asked for in held-out rows only: 1 in 8."""
    return (room - 5 * state) % 8 == 0


def generate(count: int, split: str, seed: int = 0) -> tuple[Row, ...]:
    """``count`` rows of a split ("train" or "heldout") with distinct requests. The same for ever for a seed.

    :raises ValueError: more than there are: each device has so many ways to be asked for one of its calls.
    """
    if count > len(STATES) * MOST[split]:
        raise ValueError(f"{count} rows of {split}: there are {len(STATES) * MOST[split]}")
    rng = random.Random(f"edgees home {split} {seed}")
    actions = _TRAIN if split == "train" else _HELDOUT
    calls = enumerate((device, value) for device, values in STATES.items() for value in values)
    by_device: dict[str, list[tuple[int, str | int]]] = {device: [] for device in STATES}
    for state, (device, value) in calls:
        by_device[device].append((state, value))
    rows: dict[str, Row] = {}
    while len(rows) < count:
        device = tuple(STATES)[len(rows) % len(STATES)]
        (state, value), room = rng.choice(by_device[device]), rng.randrange(len(ROOMS))
        action = rng.choice(actions[device][value if isinstance(value, str) else ""]).format(r=ROOMS[room], d=value)
        text = rng.choice(_FRAMES[split]).format(a=action)
        if text not in rows and is_heldout(state, room) == (split == "heldout"):
            answer = json.dumps(dict(zip(KEYS, (device, ROOMS[room], value), strict=True)))
            rows[text] = Row.plain(f"home/{split}/{len(rows)}", text, answer)
    return tuple(rows.values())


def format_metric(row: Row, completion: str) -> float:
    """1 if the answer is nothing but a call with all keys, a device there is and one of its states; any room."""
    call, clean = json_object(completion)
    if call is None or not clean or set(call) != set(KEYS):
        return 0.0
    device, room, value = (call[key] for key in KEYS)
    states = STATES.get(device, ()) if isinstance(device, str) else ()
    return float(any(same(value, state) for state in states) and isinstance(room, str) and bool(room))


def exact_metric(row: Row, completion: str) -> float:
    """1 if the answer is the right call and nothing else."""
    call, clean = json_object(completion)
    wanted, _ = json_object(row.answer or "")
    return float(clean and call is not None and same(call, wanted))


def load() -> Task:
    """The task: 1024 training and 192 held-out rows, always the same, so that runs can be compared."""
    return Task(
        name="home",
        train=generate(TRAIN_ROWS, "train"),
        heldout=generate(HELDOUT_ROWS, "heldout"),
        reward=("json_fields",),
        system=SYSTEM,
        max_tokens=MAX_TOKENS,
        metrics={"format": format_metric, "exact": exact_metric},
        defaults=SEARCH,
    )
