"""Sample lengths from wherever a corpus lies, without its tokens where lengths suffice."""

from __future__ import annotations

from libra.corpus.errors import CorpusError
from libra.corpus.formats import Format
from libra.corpus.read import load_lengths, read_lengths

__all__ = ["CorpusError", "Format", "load_lengths", "read_lengths"]
