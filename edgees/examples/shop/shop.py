"""A shop's assistant as an environment of edgees (TRL's shape: methods are tools): look it up, then answer."""

import random
import sqlite3

ITEMS = ("mug", "lamp", "chair", "plate", "scarf", "clock", "vase", "towel")
COLOURS = ("red", "blue", "green", "white", "black", "yellow")
ASK = {
    "train": {
        "stock": ("How many {c} {i}s do we have?", "Count the {c} {i}s, please."),
        "price": ("What does a {c} {i} cost?", "Price of the {c} {i}?"),
    },
    "heldout": {
        "stock": ("Tell me how many {i}s in {c} are left.",),
        "price": ("How much is one {i} in {c}?",),
    },
}


class Shop:
    """Rows: every item in every colour, asked for its stock or its price; what is held out shares neither words nor
    (item, colour) with what is trained on.

    Paid: 0.1 for a look-up that finds something, 0.4 more for the one that the question asks for, 0.5 more for the
    right answer after it.
    """

    system = "Look the question up with a tool, then call answer with the number."
    max_turns = 3
    max_tokens = 28
    examples = (
        {"role": "user", "content": "How many pink bowls do we have?"},
        {"role": "assistant", "content": '{"tool": "stock", "item": "bowl", "colour": "pink"}'},
        {"role": "user", "content": "Result of stock: 12"},
        {"role": "assistant", "content": '{"tool": "answer", "number": 12}'},
    )

    @staticmethod
    def rows():
        kinds = [(item, colour) for item in ITEMS for colour in COLOURS]
        random.Random("shop").shuffle(kinds)
        found = []
        for split, part in (("train", kinds[12:]), ("heldout", kinds[:12])):
            for item, colour in part:
                for what, ways in ASK[split].items():
                    for way in ways:
                        question = way.format(i=item, c=colour)
                        found.append(
                            {"question": question, "item": item, "colour": colour, "what": what, "split": split}
                        )
        return found

    def reset(self, question, item, colour, what, **row):
        self.data = sqlite3.connect(":memory:")
        self.data.execute("CREATE TABLE goods (item TEXT, colour TEXT, stock INTEGER, price INTEGER)")
        for i in ITEMS:
            for c in COLOURS:
                numbers = random.Random(f"{i} {c}")
                stock, price = numbers.randint(3, 60), numbers.randint(5, 90)
                self.data.execute("INSERT INTO goods VALUES (?, ?, ?, ?)", (i, c, stock, price))
                if (i, c) == (item, colour):
                    self.wanted = {"stock": stock, "price": price}
        self.asked = (what, item, colour)
        self.found = set()
        self.answered = None
        self.done = False
        return question

    def stock(self, item: str, colour: str) -> str:
        """How many there are.

        Args:
            item: what, in the singular.
            colour: in which colour.
        """
        return self._look("stock", item, colour)

    def price(self, item: str, colour: str) -> str:
        """What one costs.

        Args:
            item: what, in the singular.
            colour: in which colour.
        """
        return self._look("price", item, colour)

    def answer(self, number: int) -> str:
        """Answers the question.

        Args:
            number: what was found.
        """
        self.answered, self.done = number, True
        return ""

    def _look(self, what, item, colour):
        key = what, item.strip().lower(), colour.strip().lower()
        found = self.data.execute(f"SELECT {what} FROM goods WHERE item = ? AND colour = ?", key[1:]).fetchone()
        if found is None:
            return f"no {colour} {item} in the data base"
        self.found.add(key)
        return str(found[0])

    def get_reward(self):
        looked_up = self.asked in self.found
        right = looked_up and self.answered == self.wanted[self.asked[0]]
        return 0.1 * bool(self.found) + 0.4 * looked_up + 0.5 * right

    def metrics(self):
        return {"looked_up": float(self.asked in self.found), "exact": float(self.get_reward() > 0.95)}
