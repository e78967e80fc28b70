"""Synthetic corpus: short stories and short ChatML dialogues.

A story keeps its hero, place, object and ending, so that a small model can learn consistency.
"""

import random

ANIMALS = (
    "fox bear rabbit owl mouse cat dog frog duck horse turtle hedgehog squirrel lamb goat crow"
).split()
NAMES = (
    "Tom Lily Max Anna Ben Mia Sam Zoë Leo Ella Finn Ruby Noé Ivy Otto Nina José Maya Hugo Clara"
).split()
PLACES = [
    "the forest",
    "the garden",
    "the park",
    "the river",
    "the hill",
    "the beach",
    "the barn",
    "the old bridge",
    "the café",
    "the meadow",
]
OBJECTS = [
    "red ball",
    "blue kite",
    "small box",
    "shiny stone",
    "green hat",
    "wooden boat",
    "yellow flower",
    "little drum",
    "silver key",
    "warm scarf",
]
ADJ = "happy curious brave shy kind sleepy clever quiet gentle funny".split()
WEATHER = [
    "The sun was warm",
    "It was raining a little",
    "The wind was soft",
    "The sky was blue",
    "Snow was falling",
    "The morning was cold",
]
LIKES = [
    "to sing",
    "to run",
    "to read",
    "to swim",
    "to climb",
    "to dance",
    "to draw",
    "to help friends",
    "to count the stars",
    "to bake bread",
]
PROBLEM = [
    ("could not find the {o}", "looked under a tree and there it was"),
    ("wanted the {o}, but it was stuck high in a tree", "climbed up slowly and got it down"),
    ("dropped the {o} into the water", "used a long stick to pull it out"),
    ("saw that the {o} was broken", "fixed it with a bit of string"),
    ("did not want to share the {o}", "learned that sharing is more fun"),
]
END = [
    "They laughed and went home together.",
    "From that day on, they were best friends.",
    "Then they ate a big cake and fell asleep.",
    "They promised to meet again the next day.",
    "It was the best day ever. 🎉",
]
EMOJI = {
    "fox": "🦊",
    "bear": "🐻",
    "rabbit": "🐰",
    "owl": "🦉",
    "mouse": "🐭",
    "cat": "🐱",
    "dog": "🐶",
    "frog": "🐸",
    "duck": "🦆",
    "horse": "🐴",
    "turtle": "🐢",
    "hedgehog": "🦔",
    "squirrel": "🐿️",
    "lamb": "🐑",
    "goat": "🐐",
    "crow": "🐦",
}
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Denmark": "Copenhagen",
    "Finland": "Helsinki",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Greece": "Athens",
    "Ireland": "Dublin",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Canada": "Ottawa",
    "Brazil": "Brasília",
    "Iceland": "Reykjavík",
    "Turkey": "Ankara",
    "India": "New Delhi",
}
COLORS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "a banana": "yellow",
    "a strawberry": "red",
    "coal": "black",
    "an orange": "orange",
    "chocolate": "brown",
}
NUM = (
    "zero one two three four five six seven eight nine ten eleven twelve "
    "thirteen fourteen fifteen sixteen seventeen eighteen"
).split()


def story(r, animal=None, name=None):
    a = animal or r.choice(ANIMALS)
    n = name or r.choice(NAMES)
    a2 = r.choice([x for x in ANIMALS if x != a])
    n2 = r.choice([x for x in NAMES if x != n])
    p = r.choice(PLACES)
    o = r.choice(OBJECTS)
    adj = r.choice(ADJ)
    like = r.choice(LIKES)
    prob, sol = r.choice(PROBLEM)
    art = "an" if adj[0] in "aeiou" else "a"
    s = f"Once upon a time, there was {art} {adj} {a} named {n}. {n} loved {like}. "
    s += f"One day, {n} went to {p} with a {o}. {r.choice(WEATHER)}. "
    s += f'Soon {n} {prob.format(o=o)}. "Oh no!" said {n}. '
    s += f'Then {n} met a {a2} named {n2}. "Can you help me?" asked {n}. "Yes, I can," said {n2}. '
    s += f'{n2} {sol}. {n} was very happy and said, "Thank you, {n2}!" {r.choice(END)}'
    return s


IM_S, IM_E = "<|im_start|>", "<|im_end|>"


def turn(role, text):
    return f"{IM_S}{role}\n{text}{IM_E}\n"


SYSTEM = ["You are a helpful assistant.", "You tell short stories.", "You answer in one sentence."]


def qa(r):
    k = r.random()
    if k < 0.35:
        c = r.choice(list(CAPITALS))
        return f"What is the capital of {c}?", f"The capital of {c} is {CAPITALS[c]}."
    if k < 0.45:
        c = r.choice(list(COLORS))
        return f"What color is {c}?", f"{c[0].upper() + c[1:]} is {COLORS[c]}."
    if k < 0.6:
        a, b = r.randint(0, 9), r.randint(0, 9)
        return f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
    if k < 0.7:
        a = r.choice(ANIMALS)
        return f"Show me the emoji for a {a}.", f"Here it is: {EMOJI[a]}"
    if k < 0.8:
        n = r.randint(3, 12)
        return f"Count to {n}.", ", ".join(str(i) for i in range(1, n + 1)) + "."
    if k < 0.9:
        n = r.choice(NAMES)
        return f"Hello, my name is {n}.", f"Hello {n}! How can I help you today?"
    c = r.choice(list(CAPITALS))
    answer = f'{{"country": "{c}", "capital": "{CAPITALS[c]}"}}'
    return f"Give me the capital of {c} as JSON.", answer


def dialogue(r):
    s = turn("system", r.choice(SYSTEM)) if r.random() < 0.5 else ""
    for _ in range(r.choice([1, 1, 2, 3])):
        if r.random() < 0.3:
            a, n = r.choice(ANIMALS), r.choice(NAMES)
            s += turn("user", f"Tell me a story about a {a} named {n}.") + turn(
                "assistant", story(r, a, n)
            )
        else:
            q, a = qa(r)
            s += turn("user", q) + turn("assistant", a)
    return s


def docs(n, seed=0):
    r = random.Random(seed)
    for _ in range(n):
        yield story(r) if r.random() < 0.55 else dialogue(r)
