"""A transformer of 291 bfloat16 leaves, 2 GB: save it durably, load it cold, load it warm.

Shows what leaves of ordinary sizes cost on top of their bytes. Aims: save <= 1.15 x raw, warm load <= 1.3 x raw, ahead
of every peer that syncs what it saves.
"""

from benchmarks import harness

if __name__ == "__main__":
    harness.compare("transformer", __doc__)
