#!/usr/bin/env python3
"""Writes tests/model/data/tokenizer_golden.json: texts and the ids that Hugging Face's `tokenizers`
gives for them with models/tiny-gpt-oss/tokenizer.json. Run from the repository's root; needs
`pip install tokenizers`. The tests read the file and need neither.

SPDX-License-Identifier: Apache-2.0
"""
import json
import random

import tokenizers

MODEL = "models/tiny-gpt-oss/"
OUT = "tests/model/data/tokenizer_golden.json"

TEXTS = [
    "",
    "a",
    " ",
    "\n",
    "\x00",
    "Hello, world! It's 2025; don't PANIC, I'LL be back. SHE'S y'all'd've",
    "def f(self, *args):\n    return self.x[1:-1]  # comment\n\n\n\tif x:\r\n\r\n  pass   ",
    "e\u0301a\u0327\u0300 \u0301 \u0301\u0301 x\u20e3 \u0301A\u0301b\u0301C",  # combining, lone marks
    "\u6f22\u5b57\u304b\u306a\u30ab\u30bf\u30ab\u30ca\u3000\ud55c\uad6d\uc5b4 \u4e2d\u6587ABC",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3fd\U0001f1eb\U0001f1f7 \u2764\ufe0f!",
    "\u05d0\u05d1\u05d2 \u0645\u0631\u062d\u0628\u0627 \u200fabc\u200e \u0661\u0662\u0663\u0664",
    "1 12 123 1234 12345678 3.14159 1,000,000 0x7fff 1e-5",
    "\u2167\u2168 \u00b2\u00b3 \u00bd\u00bc \u3007\u2460 a\u2167b2\u00bd",  # Nl and No
    "\u01c5ungla \u01c8\u01f2 A\u01c5a \u1f88\u1f80",  # titlecase letters
    "\u02b0\u02b9x \u02e0Y \u30fc \uff70",  # modifier letters
    "It\u2019s 'S 'T 'RE 've 'M 'Ll 'D '\u017f x'\u017f X'S's",  # U+017F folds to s
    "a\u00a0b \u0085 \u0085c\u2028d\u2029e\u1680f\u180eg\u200bh\u202fi\u205fj\ufeffk",
    "x" + " " * 50 + "y" + "\t" * 9 + "\r\n" * 7 + " \n \n  z" + " " * 33,
    "\r\r\n\n\r \x0b\x0c\x1c\x1d\x1e\x1f end",
    "path/to//file/\n///\r\n ?!/\n --- ***/ ...",
    "camelCaseHTTPServer snake_case SCREAMING_CASE McDonald iOS \u00c9COLE \u00e9cole \u0130stanbul",
    "<|start|>user<|message|>Hi<|end|><|start|>assistant",
    "<|end|<|end|>|><|endoftext|><|endofprompt|><|start",
    " <|start|> \n<|reserved_200000|>  x<|call|><|return|>",
    "\u0000\u0001\u007f\u0080\u07ff\u0800\ud7fb\ue000\uffff\U00010000\U0010ffff",
    "\u0915\u094d\u0937\u093f \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0b95\u0bca \u1ebf\u1ec7 N\u0303 n\u0303's",
    "z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324\u031e\u0349a\u035a\u032f",
    "\u1e9e\u00df\u00c5\u212b\u03a9\u2126 \u0131I\u0130i K\u212a's",
]

ALPHABETS = [
    "abcdefgxyz", "ABCXYZ'", "  \t\n\r", "\u00a0\u0085\u2028\u3000\u180e\u200b", "0123456789",
    "\u2167\u00b2\u00bd", "\u0301\u0327\u20e3", "\u6f22\u5b57\u304b", "\U0001f600\u200d\U0001f3fd",
    "\u05d0\u05d1\u0645", "\u01c5\u01c8\u1f88", "\u02b0\u02b9", "/\\!?.,;:-_(){}", "\u00e9\u00fc\u00df",
]
WORDS = ["<|end|>", "<|start|>", "<|endof", "|>", "don't", "I'LL", "\r\n", "    ", "self.", "'s", "'RE"]


def random_texts(rng, count):
    for _ in range(count):
        chosen = rng.sample(ALPHABETS, rng.randint(1, 4))
        parts = []
        for _ in range(rng.randint(1, 24)):
            kind = rng.random()
            if kind < 0.15:
                parts.append(rng.choice(WORDS))
            elif kind < 0.3:
                parts.append(rng.choice(rng.choice(chosen)) * rng.randint(1, 9))
            else:
                parts.append(rng.choice(rng.choice(chosen)))
        yield "".join(parts)


def fnv(ids):
    """FNV-1a, 64 bits, over the ids as little-endian int32."""
    value = 0xCBF29CE484222325
    for id in ids:
        for byte in id.to_bytes(4, "little"):
            value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return f"{value:016x}"


def long_letters(count):
    """One piece without a seam: a multiplicative generator's letters (the test makes the same)."""
    state, letters = 1, []
    for _ in range(count):
        state = state * 48271 % 0x7FFFFFFF
        letters.append(chr(ord("a") + state % 26))
    return "".join(letters)


def main():
    as_text = tokenizers.Tokenizer.from_file(MODEL + "tokenizer.json")
    as_text.encode_special_tokens = True
    as_tokens = tokenizers.Tokenizer.from_file(MODEL + "tokenizer.json")

    def ids(tokenizer, text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    with open(MODEL + "held.txt", "rb") as file:
        documents = [part.decode() for part in file.read().split(b"\0")]
    held = [ids(as_text, text) for text in documents]
    texts = TEXTS + list(random_texts(random.Random(20), 200))
    letters = ids(as_text, long_letters(1 << 20))
    golden = {
        "made_with": "tokenizers " + tokenizers.__version__,
        "held_documents": [[len(one), fnv(one)] for one in held],
        "held_total": sum(len(one) + 1 for one in held),
        "long_letters": [len(letters), fnv(letters)],
        "cases": [[text, ids(as_text, text), ids(as_tokens, text)] for text in texts],
    }
    rows = [f"{json.dumps(key)}: {json.dumps(golden[key])}" for key in list(golden)[:-1]]
    cases = ",\n".join(json.dumps(case, separators=(",", ":")) for case in golden["cases"])
    with open(OUT, "w") as file:
        file.write("{" + ",\n".join(rows) + ',\n"cases": [\n' + cases + "\n]}\n")


if __name__ == "__main__":
    main()
