"""`libra bench attention`: one attention layer of every scheme, measured on real ranks.

    options --> windows of packs --> steps of each scheme --> SchemeRunner (runner)
                                                                  |
    BenchResult (results) <-- StepTimes, schemes in turn (measure) <--+

Call `run.run_ranks(options)` on every rank of a torchrun job.
"""
