"""Small tasks whose answers can be checked: training text and accuracy gate of the bundled model.

Every prompt falls on one side of a split by a hash of its text (`is_held_out`), so training and
held-out prompts are disjoint by construction, in any process and under any seed. Pure Python:
`train_tiny.py` trains on `training_task`, tests and benchmarks measure on `held_out`.
"""

import json
import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

HELD_OUT_ONE_IN = 10

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five")
ORDINALS = ("first", "second", "third", "fourth")
COLORS = ("red", "blue", "green", "black", "white", "pink")
WORDS = (
    *COLORS,
    *("apple", "pear", "plum", "lemon", "bread", "milk"),
    *("cat", "dog", "fox", "bird", "fish", "horse"),
    *("tree", "river", "stone", "cloud", "rain", "snow"),
)
NAMES = (
    *("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo"),
    *("Ida", "Jack", "Kate", "Leo", "Mia", "Noah", "Olga", "Paul"),
    *("Rosa", "Sam", "Tina", "Uma", "Victor", "Wendy", "Yara", "Zoe"),
)
CITIES = ("Paris", "Rome", "Berlin", "Oslo", "Lima", "Cairo", "Tokyo", "Delhi", "Boston", "Madrid")

# Openings and closings multiply the distinct prompts; the small kinds (days of the week) would
# otherwise have too few for a held-out part of their own.
OPENINGS = (
    *("Hi! ", "Hello. ", "Hey! ", "Please help: ", "Quick question: ", "Next task: ", "OK. "),
    *("Now this one: ", "Tell me: ", "One more: "),
)
CLOSINGS = (" Thanks!", " Thank you.", " Please.", " Answer briefly.", " Just the answer.")


class Task(NamedTuple):
    """One prompt with its only right answer; `check` says what counts as equal to it."""

    kind: str
    prompt: str
    answer: str


def generate(rng: random.Random, kind: str | None = None) -> Task:
    """Draw one task, of any kind unless one is named, from both sides of the split."""
    chosen = rng.choice(KINDS) if kind is None else kind
    prompt, answer = _MAKERS[chosen](rng)
    return Task(chosen, _phrase(rng, prompt), answer)


def training_task(rng: random.Random, kind: str | None = None) -> Task:
    """Draw one task whose prompt is not held out."""
    while is_held_out((task := generate(rng, kind)).prompt):
        pass
    return task


def is_held_out(prompt: str) -> bool:
    """Say on which side of the split a prompt lies; depends on its text alone."""
    digest = blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def held_out(n: int, seed: int) -> list[Task]:
    """Draw n held-out tasks with distinct prompts, the kinds taking turns."""
    rng = random.Random(seed)
    tasks: dict[str, Task] = {}
    while len(tasks) < n:
        task = generate(rng, KINDS[len(tasks) % len(KINDS)])
        if is_held_out(task.prompt):
            tasks.setdefault(task.prompt, task)
    return list(tasks.values())


def check(task: Task, text: str) -> bool:
    """Say whether text answers the task: equal but for outer space, JSON equal as a value."""
    if task.kind != "json":
        return text.strip() == task.answer
    try:
        return bool(json.loads(text) == json.loads(task.answer))
    except ValueError:
        return False


def _phrase(rng: random.Random, prompt: str) -> str:
    """Dress a bare prompt; it ends in a full stop or question mark that may be left away."""
    opening = rng.choice(OPENINGS) if rng.random() < 0.25 else ""
    if rng.random() < 0.25:
        return opening + prompt + rng.choice(CLOSINGS)
    # Only without a closing: "Repeat: red fox Thanks!" would have two right answers.
    return opening + (prompt[:-1].rstrip() if rng.random() < 0.15 else prompt)


def _count(rng: random.Random) -> tuple[str, str]:
    step = rng.choice((1, 1, 1, 1, 2, 5, 10))
    is_long = step == 1 and rng.random() < 0.1  # a stream of 40 tokens and more
    num_terms = rng.randint(20, rng.choice((40, 40, 100))) if is_long else rng.randint(2, 12)
    low = rng.randint(0, 100 - step * (num_terms - 1)) if step < 10 else rng.randrange(0, 10)
    numbers = [n for n in range(low, low + step * num_terms, step) if n <= 100]
    is_down = step == 1 and rng.random() < 0.3
    if is_down:
        numbers.reverse()
    first, last = numbers[0], numbers[-1]
    template = rng.choice(
        (
            "Count down from {a} to {b}.",
            "Count backwards from {a} to {b}.",
            "Count back from {a} to {b}.",
        )
        if is_down
        else (
            "Count from {a} to {b}{by}.",
            "Count up from {a} to {b}{by}.",
            "Count{by} from {a} to {b}.",
            "List the numbers from {a} to {b}{by}.",
            "Write the numbers from {a} to {b}{by}.",
            "Can you count from {a} to {b}{by}?",
        )
    )
    by = "" if step == 1 else f" by {step}"
    return template.format(a=first, b=last, by=by), " ".join(map(str, numbers))


def _add(rng: random.Random) -> tuple[str, str]:
    a = rng.randint(0, 99)
    b = rng.randint(0, 99 - a)
    if rng.random() < 0.5:
        a, b = b, a
    template = rng.choice(
        (
            "What is {a} + {b}?",
            "What is {a} plus {b}?",
            "What is the sum of {a} and {b}?",
            "How much is {a} + {b}?",
            "Add {a} and {b}.",
            "Add {b} to {a}.",
            "Compute {a} + {b}.",
            "{a} + {b} = ?",
            "{a}+{b}?",
        )
    )
    return template.format(a=a, b=b), str(a + b)


def _reverse(rng: random.Random) -> tuple[str, str]:
    items, what = _items(rng)
    template = rng.choice(
        (
            "Reverse: {x}.",
            "Reverse the {w}: {x}.",
            "Reverse the list {x}.",
            "Reverse the order of the {w} {x}.",
            "Write the {w} {x} backwards.",
            "What is {x} in reverse order?",
            "Give me these {w} from last to first: {x}.",
        )
    )
    return template.format(x=" ".join(items), w=what), " ".join(reversed(items))


def _repeat(rng: random.Random) -> tuple[str, str]:
    items, what = _items(rng, longest=8)
    template = rng.choice(
        (
            "Repeat: {x}.",
            "Repeat the {w}: {x}.",
            "Repeat after me: {x}.",
            "Copy the list {x}.",
            "Say the {w} {x} again.",
            "Write the {w} {x} once more.",
        )
    )
    return template.format(x=" ".join(items), w=what), " ".join(items)


def _sort(rng: random.Random) -> tuple[str, str]:
    numbers = rng.sample(range(rng.choice((10, 31))), rng.randint(3, 5))
    is_descending = rng.random() < 0.3
    template = rng.choice(
        (
            "Sort in descending order: {x}.",
            "Sort the numbers {x} from largest to smallest.",
            "Put {x} in order, largest first.",
        )
        if is_descending
        else (
            "Sort: {x}.",
            "Sort the numbers {x}.",
            "Sort these numbers: {x}.",
            "Sort the list {x} in ascending order.",
            "Sort the numbers {x} from smallest to largest.",
            "Put {x} in order, smallest first.",
            "Can you sort {x}?",
        )
    )
    answer = " ".join(map(str, sorted(numbers, reverse=is_descending)))
    return template.format(x=" ".join(map(str, numbers))), answer


def _day(rng: random.Random) -> tuple[str, str]:
    today = rng.randrange(7)
    num_days = rng.choice((1, 1, 1, 2, 2, 3, 3, 4, 5))
    sign = rng.choice((1, -1))
    answer = DAYS[(today + sign * num_days) % 7]
    number = rng.choice((str(num_days), NUMBER_WORDS[num_days]))
    span = f"{number} day{'s' if num_days > 1 else ''}"
    side = "after" if sign > 0 else "before"
    templates: list[str] = [
        "What day is {span} {side} {day}?",
        "What day comes {span} {side} {day}?",
        "Which day is {span} {side} {day}?",
        "Which day of the week is {span} {side} {day}?",
        "Name the day {span} {side} {day}.",
        "Give the day {span} {side} {day}.",
        "{Span} {side} {day}?",
    ]
    if sign > 0:
        templates += ["If today is {day}, what day is it in {span}?"]
        templates += ["Today is {day}. What day will it be in {span}?"]
    else:
        templates += ["If today is {day}, what day was it {span} ago?"]
        templates += ["Today is {day}. What day was {span} ago?"]
    if num_days == 1:
        neighbour = "tomorrow" if sign > 0 else "yesterday"
        templates += ["What day comes {side} {day}?", "Which day comes right {side} {day}?"]
        templates += ["What is the day {side} {day}?", f"Today is {{day}}. Name {neighbour}."]
        templates += [f"If today is {{day}}, what day {'is' if sign > 0 else 'was'} {neighbour}?"]
    prompt = rng.choice(templates).format(
        span=span, Span=span[0].upper() + span[1:], side=side, day=DAYS[today]
    )
    return prompt, answer


def _pick(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        numbers = rng.sample(range(rng.choice((10, 100))), rng.randint(3, 5))
        which, answer = rng.choice((("largest", max(numbers)), ("smallest", min(numbers))))
        items, what, picked = list(map(str, numbers)), "number", str(answer)
    else:
        items, what = rng.sample(WORDS, rng.randint(3, 5)), "word"
        at = rng.choice([-1, *range(min(len(items), len(ORDINALS)))])
        which, picked = "last" if at == -1 else ORDINALS[at], items[at]
    template = rng.choice(
        (
            "What is the {k} {w} in {x}?",
            "What is the {k} {w} of this list: {x}?",
            "Which {w} is the {k} of {x}?",
            "Pick the {k} {w} from {x}.",
            "Give me the {k} {w}: {x}.",
            "Here is a list: {x}. Name the {k} {w}.",
        )
    )
    return template.format(k=which, w=what, x=" ".join(items)), picked


def _json(rng: random.Random) -> tuple[str, str]:
    fields: dict[str, str | int] = {"name": rng.choice(NAMES), "age": rng.randint(1, 99)}
    if rng.random() < 0.5:
        extra: dict[str, Sequence[str]] = {"city": CITIES, "color": COLORS}
        key = rng.choice(list(extra))
        fields[key] = rng.choice(extra[key])
    order = list(fields)
    if rng.random() < 0.3:
        rng.shuffle(order)
    pairs = [f"{key} {fields[key]}" for key in order]
    listed = ", ".join(pairs[:-1]) + " and " + pairs[-1]
    template = rng.choice(
        (
            "Make a JSON object with {x}.",
            "Make a JSON object from {x}.",
            "Write JSON with {x}.",
            "Give me JSON: {x}.",
            "Turn this into JSON: {x}.",
            "Return a JSON object for {x}.",
        )
    )
    return template.format(x=listed), json.dumps({key: fields[key] for key in order})


def _items(rng: random.Random, longest: int = 6) -> tuple[list[str], str]:
    """Draw things to reorder or copy, none of them twice, and the plural noun for them."""
    what = rng.choice(("letters", "digits", "words"))
    if what == "words":
        return rng.sample(WORDS, rng.randint(2, longest - 2)), what
    alphabet = LETTERS if what == "letters" else "0123456789"
    return rng.sample(alphabet, rng.randint(3, longest)), what


_MAKERS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "count": _count,
    "add": _add,
    "reverse": _reverse,
    "repeat": _repeat,
    "sort": _sort,
    "day": _day,
    "pick": _pick,
    "json": _json,
}
KINDS = tuple(_MAKERS)
