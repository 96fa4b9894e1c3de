"""Text as tokens: frequent words, and single bytes for everything else."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from byte_text import library_files, read_text

NUM_BYTES = 256
MOST_WORDS = 2048
LEAST_COUNT = 2  # of a word that is a token
PIECE = re.compile(rb" ?[A-Za-z]+|.", re.DOTALL)
DOCUMENTATION = re.compile(r'"""(.*?)"""', re.DOTALL)
COMMENT = re.compile(r"(?:^[ \t]*# .*\n){2,}", re.MULTILINE)
SENTENCE = re.compile(r"[A-Z][a-z]*( [A-Za-z'()-]+[,;:]?){4,30}[.]")


class Text(NamedTuple):
    """A text and its vocabulary: tokens below 256 are bytes, the others are words.

    Attributes:
        tokens: of the whole text, int32.
        words: each with the space before it, if it has one.
    """

    tokens: torch.Tensor
    words: Sequence[bytes]

    @property
    def num_tokens(self) -> int:
        """The size of the vocabulary."""
        return NUM_BYTES + len(self.words)

    def encode(self, text: bytes) -> list[int]:
        return _encode(text, self.words)

    def decode(self, tokens: Sequence[int]) -> bytes:
        return b"".join(
            bytes([token]) if token < NUM_BYTES else self.words[token - NUM_BYTES]
            for token in tokens
        )


def load_words(path: Path | None) -> Text:
    """Loads a file, or a folder's text files, or the simple sentences of Python's documentation.

    Every rank of one machine gets the same tokens.

    Raises:
        ValueError: there are fewer than 10,000 bytes of text.
    """
    text = _simple_sentences() if path is None else bytes(read_text(path))
    counts = collections.Counter(piece for piece in PIECE.findall(text) if len(piece) > 1)
    words = [word for word, count in counts.most_common(MOST_WORDS) if count >= LEAST_COUNT]
    return Text(torch.tensor(_encode(text, words), dtype=torch.int32), words)


def _encode(text: bytes, words: Sequence[bytes]) -> list[int]:
    known = {word: NUM_BYTES + i for i, word in enumerate(words)}
    tokens: list[int] = []
    for piece in PIECE.findall(text):
        if piece in known:
            tokens.append(known[piece])
        else:
            tokens.extend(piece)
    return tokens


def _simple_sentences() -> bytes:
    """Sentences of frequent words only: a small model learns them in a minute."""
    sentences = list(dict.fromkeys(_sentences()))
    counts = collections.Counter(word for each in sentences for word in _words(each))
    frequent = {word for word, _ in counts.most_common(MOST_WORDS)}
    return "\n".join(s for s in sentences if frequent.issuperset(_words(s))).encode()


def _words(sentence: str) -> list[str]:
    return re.findall("[A-Za-z]+", sentence)


def _sentences() -> Iterator[str]:
    """The sentences in the documentation of Python's standard library that have words alone."""
    for file in library_files():
        source = file.read_text("utf-8", errors="replace")
        comments = [re.sub(r"^[ \t]*# ", "", each, flags=re.M) for each in COMMENT.findall(source)]
        for documentation in [*DOCUMENTATION.findall(source), *comments]:
            for paragraph in re.split(r"\n\s*\n", documentation):
                for sentence in re.split(r"(?<=[.]) ", " ".join(paragraph.split())):
                    if SENTENCE.fullmatch(sentence):
                        yield sentence
