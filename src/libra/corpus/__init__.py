"""Sample lengths of a corpus, in its order, without its tokens where lengths suffice.

    file, folder or standard input
      |  read.py       finds the format by content and name; unzips; lists a folder's shards
      v
    text.py            integers as text, JSON lines, .npy; counts tokens of texts with a tokenizer
    arrow.py           Parquet, Arrow and Feather files, folders of `datasets.save_to_disk`
    megatron.py        the `.idx` next to a `.bin`
      |  request.py    column names, checks, and CorpusError with the file and the row
      v
    int64 arrays of at most `chunk` lengths, each in [1, 2^31]

`read_lengths` is the function to call; `load_lengths` returns the same as one array.
"""

from __future__ import annotations

from libra.corpus.read import Format, load_lengths, read_lengths
from libra.corpus.request import CorpusError

__all__ = ["CorpusError", "Format", "load_lengths", "read_lengths"]
