"""Sudoku as an environment of edgees (gymnasium's shape): a grid with masked cells, one cell a turn."""

import random
import re


def solution(seed):
    """A full grid, 9 lists of 9 digits: a fixed one with its digits, bands, rows and columns shuffled."""
    dice = random.Random(seed)
    digits = dice.sample(range(1, 10), 9)
    lines = [band * 3 + row for band in dice.sample(range(3), 3) for row in dice.sample(range(3), 3)]
    stacks = [stack * 3 + column for stack in dice.sample(range(3), 3) for column in dice.sample(range(3), 3)]
    return [[digits[(3 * (r % 3) + r // 3 + c) % 9] for c in stacks] for r in lines]


class Sudoku:
    """``masked`` cells are empty at first; ``set ROW COLUMN VALUE`` fills one. A value that breaks a rule of the game
    is refused, and so is one in a cell that is given.

    Paid: up to 0.1 for the turns (a quarter of it for actions that can be read, as much for cells that are empty, half
    for values that are allowed), 0.4 for the share of empty cells filled as in the solution, 0.5 for all of them.
    """

    system = "Fill the empty cells (.) of the Sudoku. Answer with one action: set ROW COLUMN VALUE"
    max_tokens = 12
    examples = (
        {
            "role": "user",
            "content": "234198576\n819765234\n57634281.\n798653142\n142987365\n365421798\n921876453\n687534921\n"
            "453219687\nempty: row 3 column 9",
        },
        {"role": "assistant", "content": "set 3 9 9"},
    )

    def __init__(self, masked=3):
        if not 1 <= int(masked) <= 15:
            raise ValueError(f"masked = {masked}: 1 to 15 cells can be empty")
        self.masked = int(masked)
        self.max_turns = self.masked + 2

    def reset(self, seed, **row):
        self.solution = solution(seed)
        cells = [(r, c) for r in range(9) for c in range(9)]
        self.empty = set(random.Random(f"mask {seed}").sample(cells, self.masked))
        self.grid = [[0 if (r, c) in self.empty else self.solution[r][c] for c in range(9)] for r in range(9)]
        self.turns = self.credit = 0
        return self.board()

    def board(self):
        lines = ["".join(str(v) if v else "." for v in line) for line in self.grid]
        left = ", ".join(f"row {r + 1} column {c + 1}" for r, c in sorted(self.empty) if not self.grid[r][c])
        return "\n".join(lines) + f"\nempty: {left}"

    def parse_action(self, text):
        found = re.search(r"set\s+([1-9])\W+([1-9])\W+([1-9])", text.lower())
        return " ".join(found.groups()) if found else None

    def step(self, action):
        self.turns += 1
        if not action:
            return "That is no action. Write: set ROW COLUMN VALUE", 0.0, False, {"invalid": True}
        r, c, value = (int(word) - 1 for word in action.split())
        value += 1
        self.credit += 0.25
        if (r, c) not in self.empty:
            return f"Row {r + 1} column {c + 1} is given. " + self.board(), 0.0, False, {"invalid": True}
        self.credit += 0.25
        if self.clashes(r, c, value):
            return f"{value} stands in that row, column or box already. " + self.board(), 0.0, False, {"invalid": True}
        self.credit += 0.5
        self.grid[r][c] = value
        solved = all(self.grid[r][c] == self.solution[r][c] for r, c in self.empty)
        return self.board(), 0.0, solved, {}

    @property
    def actions(self):
        """Replies that are possible, for ``--grammar actions``: any digit in any empty cell."""
        return [f"set {r + 1} {c + 1} {digit}" for r, c in sorted(self.empty) for digit in range(1, 10)]

    def clashes(self, r, c, value):
        box = [(r // 3 * 3 + i, c // 3 * 3 + j) for i in range(3) for j in range(3)]
        peers = {(r, j) for j in range(9)} | {(i, c) for i in range(9)} | set(box)
        return any(self.grid[i][j] == value for i, j in peers - {(r, c)})

    def get_reward(self):
        right = sum(self.grid[r][c] == self.solution[r][c] for r, c in self.empty) / len(self.empty)
        return 0.1 * self.credit / max(self.turns, 1) + 0.4 * right + 0.5 * (right == 1.0)

    def metrics(self):
        right = sum(self.grid[r][c] == self.solution[r][c] for r, c in self.empty) / len(self.empty)
        return {"filled": right, "solved": float(right == 1.0)}
