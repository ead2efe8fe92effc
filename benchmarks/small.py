"""10,000 leaves of 4 KB: save them durably, load them cold, load them warm.

Shows the cost of a leaf as such: names, metadata, index. Aim: at least 30 times as fast as Orbax both ways, whatever
its compression, and within 3 times safetensors. The untimed rehearsal does 200 leaves only: Orbax needs some 2 ms for
each. "tofile" is left out by default: 10,000 files to sync measure the file system.
"""

from benchmarks import harness

if __name__ == "__main__":
    harness.compare("small", __doc__, peers=[peer for peer in harness.ALL if peer != "tofile"])
