"""Choosing a configuration from a corpus's lengths, before any GPU is rented.

    corpus of lengths
      |  windows.py          WindowReader: packs, and windows of one optimizer step
      v
    windows of GBS packs ------------------------------------> pooling.py: imbalance against P
      |  sample.py           some windows of a long corpus
      |  replay.py           every candidate (P, B, H): pools, plans and traffic as in training
      v
    replayed candidates
      |  libra.cost          seconds of attention, of the step, bytes of memory
      |  recommend.py        the best candidate, and warnings
      v
    best candidate
      |  schemes.py          the ways to balance attention: Ulysses, WLB, TAP, Libra, ...
      |  predict.py          attention seconds of each scheme
      |  compare.py          schemes in a few windows, and with more or fewer replicas
      v
    Study (results.py) --> table, JSON, report

`run_study` does all of it.  `libra simulate` asks it for what its options say, then prints and
writes the `Study`.  `calibrate.py` makes the kernel table of a machine.  Nothing here needs a GPU
or PyTorch.
"""

from __future__ import annotations

from libra.simulate.results import Study, study_json
from libra.simulate.study import StudyConfig, StudyOptions, run_study

__all__ = ["Study", "StudyConfig", "StudyOptions", "run_study", "study_json"]
