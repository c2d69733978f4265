"""Two hundred prompts of five kinds; the text of `benchmarks.drafter` has other topics."""

_TOPICS = (
    "lighthouses", "the harvest", "sourdough", "a lost umbrella", "the night train", "old maps",
    "the village choir", "winter markets", "a broken clock", "the orchard", "river ferries",
    "mountain huts", "the town archive", "kites", "a new neighbour", "the school play",
    "beekeeping", "street musicians", "the last bus", "foggy mornings", "the bookbinder",
    "wild mushrooms", "a borrowed coat", "the harbour", "puppet theatre", "the ice rink",
    "stone walls", "a quiet library", "the observatory", "toy boats", "the tailor's shop",
    "garden snails", "a hidden diary", "a long walk", "the old mill", "windy rooftops",
    "the rowing club", "an empty theatre", "the flower stall", "thunderstorms",
)  # fmt: skip
_TASKS = (
    "reverses a string", "counts the vowels in a text", "finds the largest number in a list",
    "checks whether a number is prime", "merges two sorted lists", "computes a factorial",
    "removes duplicates from a list", "reads a CSV file", "converts Celsius to Fahrenheit",
    "checks whether a word is a palindrome", "computes the mean of a list", "flattens a list",
    "sorts words by length", "counts words in a file", "generates Fibonacci numbers",
    "rounds a price to two decimals", "finds common elements of two lists", "parses a date",
    "computes the greatest common divisor", "transposes a matrix", "validates an email address",
    "shuffles a deck of cards", "computes compound interest", "splits a text into sentences",
    "groups words by first letter", "finds the second smallest number", "prints a triangle",
    "multiplies two matrices", "replaces tabs by spaces", "counts characters", "rotates a list",
    "checks balanced brackets", "encodes a text in Morse code", "converts binary to decimal",
    "computes the median", "finds missing numbers in a range", "capitalises each word",
    "draws a random sample", "measures the time of a call", "builds a simple stack class",
)  # fmt: skip


def prompts() -> dict[str, list[tuple[str, bool]]]:
    """Forty prompts of each kind, and whether each is a question of a chat."""
    return {
        "chat": [(f"What can you tell me about {topic}?", True) for topic in _TOPICS],
        "prose": [(f"It was a story about {topic}, and it began", False) for topic in _TOPICS],
        "code": [(f"Write a Python function that {task}.", True) for task in _TASKS],
        "lists": [(f"List ten words that go with {topic}.", True) for topic in _TOPICS],
        "dialogue": [
            (f"Anna: Do you remember {topic}?\nBen: Of course I do.\nAnna:", False)
            for topic in _TOPICS
        ],
    }
