"""What Libra is measured against, behind the same interface: rows of this rank in, their outputs
out.
"""
