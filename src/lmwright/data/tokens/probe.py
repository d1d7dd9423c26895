"""Probe texts: the texts on which two tokenizer libraries are most likely to disagree.

Used at run time before one library stands in for another, and in tests.
"""

import unicodedata

CODE = (
    "def f(x):\n    if x:\r\n\t\treturn {'a': [1, 22, 333, 4444, 55555]}  # don't\n\n\n\n\tpass  \n"
)
PROSE = (
    "I'M sure it's they'll WE'VE he'd o'clock 'tis I'm, you're; CAN'T ''s 'S '\u017f I'\u212a.",
    "  leading, trailing   and   many    spaces  ",
    "a b  c   d    e\n \n  \n\t\n   \n x\n\n\ny \t z\r\n\r\nw",
    "1 12 123 1234 12345 1,234.5 -6 1e10 0x7f 3\u00bd \u0663\u0664\u0665 \u2163 \u00b2\u00b3 x2y",
    "!!! ??? ... ---- ==== /* // ## $$ @me #tag a/b/c\\d http://x.y/z?q=1&r=%20",
    "<|endoftext|></s><s><unk><pad>[SEP][CLS]<|im_start|>user<|im_end|> <|begin_of_text|>x<0x0A>",
    "\u00e9 e\u0301 \ufb01 \uff21\uff22 \u2460 \u1e9b\u0323 \u212b \u03a9\u2126",
    "\ud55c\uae00 \u1112\u1161 \u2764",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \u0417\u0434\u0440\u0430",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1ef\U0001f1f5 \U0001f44d\U0001f3fd\ufe0f",
    "\u00a0x\u2003y\u3000z\u2028p\u2029q\u0085r\u200bs\u180et\ufeffu\u1680v\x0bw\x0cx\x1cy\x1fz",
    "\x01\x02\x07\x7f\x80\x9f \ue000 \U000f0000 \U0010ffff \ufffe \u0378",
    "a" * 300 + " " * 100 + "b" + "\n" * 70 + "=" * 200,
)


def _every_kind() -> list[str]:
    """One text for each Unicode category: characters from all over the planes, in contexts."""
    kinds: dict[str, list[str]] = {}
    step_of_plane = {0: 37, 1: 401}
    for plane, step in step_of_plane.items():
        for code in range(plane << 16, (plane + 1) << 16, step):
            c = chr(code)
            if code > 127 and unicodedata.category(c) not in ("Cs", "Cn"):
                kinds.setdefault(unicodedata.category(c), []).append(c)
    texts = []
    for kind in sorted(kinds):
        texts.append(" ".join(f"a{c}1{c}{c} {c}" for c in kinds[kind][:150]))
    return texts


PROBE: tuple[str, ...] = ("", " ", "\n", CODE, *PROSE, *_every_kind())

BLANKS: tuple[str, ...] = tuple(
    before + " " * n + after for n in range(1, 70) for before, after in (("", ""), ("a", "b"))
)
"""Runs of blanks of every length, at the ends of a text and inside."""
