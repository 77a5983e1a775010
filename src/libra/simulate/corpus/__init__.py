"""Sample lengths from wherever a corpus lies, without its tokens where lengths suffice."""

from __future__ import annotations

from libra.simulate.corpus.errors import CorpusError
from libra.simulate.corpus.formats import Format
from libra.simulate.corpus.read import load_lengths, read_lengths

__all__ = ["CorpusError", "Format", "load_lengths", "read_lengths"]
