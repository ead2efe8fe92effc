"""One float32 leaf of 2 GB: save it durably, load it cold, load it warm.

Shows whether the engine keeps up with the disk and with memory. Aims: save <= 1.15 x raw, cold load <= 1.1 x raw, never
slower than any peer of the same run.
"""

from benchmarks import harness

if __name__ == "__main__":
    harness.compare("large", __doc__)
