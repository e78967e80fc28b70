"""The texts that every converted tokenizer must split as its source does.

They hold many scripts, many kinds of white space, digits, code, contractions in both cases, runs of
punctuation and emoji of several code points: tokenizers that look alike differ there.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence

TEXTS: tuple[str, ...] = (
    "Hello, world!",
    " Hello World",
    "hello  world   with    runs     of spaces",
    "trailing spaces   ",
    "\t\tfor (int i = 0; i < 10; ++i) {\n\t\t\tsum += a[i] * b[i]; // done\n\t\t}\n",
    "line one\nline two\n\nline four\n\n\nline seven\n \n \n",
    "Windows\r\nlines\r\n\r\nend",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2.5, -3e10]}\n",
    "I'm you're he'll she'd we've it's don't CAN'T WE'LL I'VE THEY'RE",
    "O'Neill's 'quoted' ''double'' rock'n'roll",
    "0 1 12 123 1234 12345 123456 1234567890",
    "3.14159 -42 +7 1,000,000 1e-9 0xFF 50% $9.99 №5 ½ ² ٣٤٥ १२३",
    "!!!??? ... ,,, --- === *** ### @@@ ((([[[{{{}}}]]])))",
    "a/b\\c|d~e`f^g_h-i+j=k:l;m<n>o?p",
    "https://example.org/path?query=1&other=%20#fragment user@example.org",
    "CamelCaseWords snake_case_words SCREAMING_CASE kebab-case-words",
    "Äpfel, Öl und Übermut: Straße, Fuß, größer.",
    "Ça va? L'été à la plage, où êtes-vous, naïve Noël, œuvre.",
    "¿Dónde está el niño? ¡Mañana por la mañana!",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "Zażółć gęślą jaźń",
    "Pchnąć w tę łódź jeża lub ośm skrzyń fig",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "нещо на Български",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "עטלף אבק נס דרך מזגן שהתפוצץ כי חם",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश",
    "আমি বাংলায় গান গাই",
    "நல்ல தமிழ் வாக்கியம்",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "ខ្ញុំអាចញ៉ាំកញ្ចក់បាន",
    "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。",
    "我喜欢吃苹果和香蕉。你呢？价格是123元。",
    "いろはにほへと ちりぬるを カタカナ ｶﾅ 漢字。",
    "다람쥐 헌 쳇바퀴에 타고파. 한국어 문장입니다!",
    "Tiếng Việt có nhiều dấu: ắ ằ ẳ ẵ ặ",
    "ᚠᛇᚻ ᛒᛦᚦ ᚠᚱᚩᚠᚢᚱ",
    "😀 😂🤣 🚀🌕 ❤️ ✨",
    "👨‍👩‍👧‍👦 👩🏽‍💻 🏳️‍🌈 🇩🇪🇯🇵 1️⃣",
    "e\u0301 n\u0303 o\u0308 \u200b zero\u200bwidth soft\u00adhyphen no\u00a0break",
    "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛 ∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ ∑∫√π≈3",
    "“curly quotes” ‘single’ «guillemets» — dash – dash … ellipsis • bullet",
    "\u3000full\u3000width ＡＢＣ１２３",
    "mixed日本語and한국어andрусскийandالعربية",
    '<html><body class="x">&nbsp;&amp;</body></html>',
    "SELECT * FROM t WHERE a >= 10 AND b != 'x' -- comment",
    "a",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "न॒मस्ते ১২৩ ௧௨௩ ၁၂၃ ០១២ ๑๒๓ ༡༢༣",
    "a\u0301\u0323 A\u030a \u1100\u1161\u11a8 が か\u3099 ﬁ Ⅷ ㎏ ①",
    "\u00a0a\u2003b\u2009c\u200ad\u202fe\u205ff\u3000g\u2028h\u2029i\u0085j\x0bk\x0cl",
    "שָׁלוֹם עֲלֵיכֶם  مُحَمَّد  ـــ  ١٢٣٤٥٦",
    "👩‍❤️‍💋‍👨 🧑🏿‍🚀 🏴󠁧󠁢󠁥󠁮󠁧󠁿 #️⃣ \ufe0f\u200d",
)

_RUNS = tuple(f"x{c * n}y" for c in (" ", "\t", "\n", "\r\n", "-") for n in (12, 24, 40, 100))
"""Tokenizers differ in how they split a run that is longer than their tokens."""
_N_GENERATED = 48
_MOST_SPECIAL = 64
_ALPHABETS: tuple[str, ...] = (
    "etaoinshrdluETAOIN",
    "0123456789",
    "٠١٢٣٤٥٦٧٨٩०१२३४५६७८९",
    " \t\n\r\u00a0\u3000",
    ".,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+`~",
    "àâäéèêëïîôöùûüÿçñß",
    "e\u0301a\u0308o\u0323\u0302n\u0303",
    "абвгдежзийклмнопАБВГ",
    "αβγδεζηθΑΒΓΔ",
    "अआइईकखगघािीुू्",
    "กขคงจฉชซะาิีึ",
    "漢字日本語中文学習",
    "ひらがなカタカナ",
    "가나다라마바사",
    "אבגדהוזחט",
    "ابتثجحخد",
    "😀🚀👩‍💻❤️🇩🇪",
)


def texts(special: Sequence[str]) -> list[str]:
    """All test texts: fixed ones, generated ones, and several forms with each special token.

    If there are many special tokens, an even selection of them is used.
    """
    step = -(-len(special) // _MOST_SPECIAL) or 1
    around = [
        form.replace("{}", token)
        for token in special[::step]
        for form in ("{}", "{}{}", "a{}b", " {} ", "x {} y", "{}\n\n{} z", "{}  two", "e{}\u0301")
    ]
    return [*TEXTS, *_RUNS, *_generated(), *around]


def _generated() -> list[str]:
    """Runs of characters from a few alphabets at a time; every call gives the same texts."""
    choice = random.Random(20)
    found = []
    for _ in range(_N_GENERATED):
        alphabets = choice.sample(_ALPHABETS, 3)
        runs = (
            "".join(choice.choices(choice.choice(alphabets), k=choice.randint(1, 6)))
            for _ in range(12)
        )
        found.append("".join(runs))
    return [*found, *(unicodedata.normalize("NFD", text) for text in found[::4])]
