"""`libra bench`: schemes side by side on real ranks, on the same windows of a corpus."""
