"""Parts of `benchmarks/slow_link.py`: the network, the ranks in it, what their events mean."""
